"""Write images in MNIST's format as a folder for each class: train and val."""

import argparse
import gzip
from pathlib import Path

import numpy as np
from PIL import Image

NAMES = "top trousers pullover dress coat sandal shirt sneaker bag boot".split()


def read(path, header):
    """Return the bytes after the header of a file in MNIST's format."""
    with gzip.open(path) as file:
        return np.frombuffer(file.read()[header:], np.uint8)


def write(root, start, folder, count):
    """Write the first `count` images."""
    images = read(f"{root}/{start}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)[:count]
    labels = read(f"{root}/{start}-labels-idx1-ubyte.gz", 8)
    for index, image in enumerate(images):
        path = folder / NAMES[labels[index]] / f"{index:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--root", default="/usr/share/datasets/fashion-mnist")
    parser.add_argument("--train", type=int, default=4000)
    parser.add_argument("--val", type=int, default=1000)
    given = parser.parse_args()
    write(given.root, "train", given.folder / "train", given.train)
    write(given.root, "t10k", given.folder / "val", given.val)
