"""What is known of each of torchvision's datasets before it is read: its files, parts and classes.

Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from expt.config.datasets import Torchvision
from expt.config.torchvision_sets import OPTIONS, options_of

Options = Mapping[str, Any]
_TRAIN: dict[str, Options | None] = {"train": {"train": True}, "test": {"train": False}}
_SPLIT: dict[str, Options | None] = {"train": {"split": "train"}, "test": {"split": "test"}}
_THREE: dict[str, Options | None] = {**_SPLIT, "val": {"split": "val"}}
_NO_TEST: dict[str, Options | None] = {"train": {"split": "train"}, "val": {"split": "val"}}
_ONE: dict[str, Options | None] = {"train": {}}
_SETS: dict[str, Options | None] = {"train": {"image_set": "train"}, "val": {"image_set": "val"}}
_REGISTERED = "its owners give it to those who have registered there alone"
_BY_HAND = "torchvision cannot download it"


class Kind(NamedTuple):
    """What is known of a dataset beforehand."""

    num_classes: int | None
    """None where its files say it."""
    paths: tuple[str, ...]
    """Its files and folders, below the root."""
    parts: Mapping[str, Options | None]
    """What its class is constructed with for `train`, `val` and `test`, those that there are."""
    layout: str | None = None
    """Of its attribute `data`, uint8 images in memory: HW, HWC or CHW; None: it reads image by
    image.
    """
    unfetched: str = ""
    """Why torchvision cannot download it, if so."""
    grey: bool = False
    """Whether images that are read one by one have one channel."""

    @property
    def fetched(self) -> bool:
        """Whether torchvision can download it."""
        return not self.unfetched

    @property
    def channels(self) -> int:
        """Of its images as they are."""
        return 1 if self.grey or self.layout == "HW" else 3


KINDS = {
    "CIFAR10": Kind(10, ("cifar-10-batches-py",), _TRAIN, "HWC"),
    "CIFAR100": Kind(100, ("cifar-100-python",), _TRAIN, "HWC"),
    # 3 to 10 objects, of which its test says nothing.
    "CLEVRClassification": Kind(11, ("clevr",), _NO_TEST),
    "Caltech101": Kind(101, ("caltech101",), _ONE),
    "Caltech256": Kind(257, ("caltech256",), _ONE),
    "CelebA": Kind(None, ("celeba",), {**_SPLIT, "val": {"split": "valid"}}),
    "Cityscapes": Kind(19, ("gtFine", "leftImg8bit"), _NO_TEST, unfetched=_REGISTERED),
    "Country211": Kind(211, ("country211",), {**_SPLIT, "val": {"split": "valid"}}),
    "DTD": Kind(47, ("dtd",), _THREE),
    "EMNIST": Kind(
        47,
        ("EMNIST",),
        {part: {"split": "balanced", **(how or {})} for part, how in _TRAIN.items()},
        "HW",
    ),
    "EuroSAT": Kind(10, ("eurosat",), _ONE),
    "FER2013": Kind(7, ("fer2013",), _SPLIT, unfetched=_BY_HAND, grey=True),
    "FGVCAircraft": Kind(100, ("fgvc-aircraft-2013b",), _THREE),
    "FashionMNIST": Kind(10, ("FashionMNIST",), _TRAIN, "HW"),
    "Flowers102": Kind(102, ("flowers-102",), _THREE),
    "Food101": Kind(101, ("food-101",), _SPLIT),
    "GTSRB": Kind(43, ("gtsrb",), _SPLIT),
    "INaturalist": Kind(None, (), {}),
    "Imagenette": Kind(10, ("imagenette2",), _NO_TEST),
    "KMNIST": Kind(10, ("KMNIST",), _TRAIN, "HW"),
    # Nobody of its test is in its train: all are one part.
    "LFWPeople": Kind(None, ("lfw-py",), _ONE, unfetched=_BY_HAND),
    "LSUN": Kind(None, (), {}, unfetched=_BY_HAND),
    "MNIST": Kind(10, ("MNIST",), _TRAIN, "HW"),
    # The characters of its evaluation are others than those of its background.
    "Omniglot": Kind(None, (), _ONE, grey=True),
    "OxfordIIITPet": Kind(
        37, ("oxford-iiit-pet",), {"train": {"split": "trainval"}, "test": {"split": "test"}}
    ),
    "PCAM": Kind(2, ("pcam",), _THREE),
    # Its test has no classes.
    "Places365": Kind(365, (), {"train": {"split": "train-standard"}, "val": {"split": "val"}}),
    "QMNIST": Kind(10, ("QMNIST",), _TRAIN, "HW"),
    "RenderedSST2": Kind(2, ("rendered-sst2",), _THREE),
    "SBDataset": Kind(21, ("img", "cls", "train.txt", "val.txt"), _SETS),
    "SEMEION": Kind(10, ("semeion.data",), _ONE, "HW"),
    "STL10": Kind(10, ("stl10_binary",), _SPLIT, "CHW"),
    "SUN397": Kind(397, ("SUN397",), _ONE),
    "SVHN": Kind(10, ("train_32x32.mat", "test_32x32.mat"), _SPLIT, "CHW"),
    "StanfordCars": Kind(196, ("stanford_cars",), _SPLIT),
    "USPS": Kind(10, ("usps.bz2", "usps.t.bz2"), _TRAIN, "HW"),
    "VOCSegmentation": Kind(21, ("VOCdevkit/VOC2012",), _SETS),
}


def kind_of(dataset: Torchvision) -> Kind:
    """What is known of the dataset, with the options that are chosen of it."""
    kind, chosen = KINDS[dataset.set], options_of(dataset.set, dataset.options)
    return _CHANGED.get(dataset.set, _with)(kind, chosen)


def _with(kind: Kind, chosen: Options) -> Kind:
    """Its class is constructed with what is chosen for each part."""
    return kind._replace(
        parts={part: {**(how or {}), **chosen} for part, how in kind.parts.items()}
    )


def _celeba(kind: Kind, chosen: Options) -> Kind:
    if chosen.get("target_type") == "identity":  # nobody of its test is in its train
        kind = kind._replace(parts={"train": {"split": "all"}})
    return _with(kind, chosen)


def _emnist(kind: Kind, chosen: Options) -> Kind:
    number = {"byclass": 62, "letters": 27, "digits": 10, "mnist": 10}.get(
        str(chosen.get("split")), 47
    )
    return _with(kind._replace(num_classes=number), chosen)


def _aircraft(kind: Kind, chosen: Options) -> Kind:
    is_coarse = chosen.get("annotation_level", "variant") != "variant"
    return _with(kind._replace(num_classes=None) if is_coarse else kind, chosen)


def _imagenette(kind: Kind, chosen: Options) -> Kind:
    pixels = {"320px": "-320", "160px": "-160"}.get(str(chosen.get("size")), "")
    return _with(kind._replace(paths=(f"imagenette2{pixels}",)), chosen)


def _inaturalist(kind: Kind, chosen: Options) -> Kind:
    version, rest = (
        chosen.get("version", "2021_train"),
        {"target_type": chosen.get("target_type", "full")},
    )
    parts: dict[str, Options | None] = {"train": {"version": version, **rest}}
    if version.startswith("2021"):
        parts["val"] = {"version": "2021_valid", **rest}
    return kind._replace(
        paths=tuple(str((how or {})["version"]) for how in parts.values()), parts=parts
    )


def _lsun(kind: Kind, chosen: Options) -> Kind:
    scenes = chosen.get("classes", OPTIONS["LSUN"]["classes"])
    parts: dict[str, Options | None] = {
        part: {"classes": [f"{scene}_{part}" for scene in scenes]} for part in ("train", "val")
    }
    return kind._replace(
        paths=tuple(f"{name}_lmdb" for how in parts.values() for name in (how or {})["classes"]),
        parts=parts,
    )


def _omniglot(kind: Kind, chosen: Options) -> Kind:
    name = "images_background" if chosen.get("background", True) else "images_evaluation"
    return _with(kind._replace(paths=(f"omniglot-py/{name}", f"omniglot-py/{name}.zip")), chosen)


def _places(kind: Kind, chosen: Options) -> Kind:
    split, size = chosen.get("split", "train-standard"), "256" if chosen.get("small") else "large"
    variant = split.partition("-")[2]
    lists = ("categories_places365.txt", f"places365_train_{variant}.txt", "places365_val.txt")
    small = {"small": bool(chosen.get("small"))}
    parts: dict[str, Options | None] = {
        "train": {"split": split, **small},
        "val": {"split": "val", **small},
    }
    return kind._replace(paths=(*lists, f"data_{size}_{variant}", f"val_{size}"), parts=parts)


def _voc(kind: Kind, chosen: Options) -> Kind:
    year = chosen.get("year", "2012")
    above = "TrainVal/" if year == "2011" else ""
    return _with(kind._replace(paths=(f"{above}VOCdevkit/VOC{year}",)), chosen)


_CHANGED: Mapping[str, Callable[[Kind, Options], Kind]] = {
    "CelebA": _celeba,
    "EMNIST": _emnist,
    "FGVCAircraft": _aircraft,
    "INaturalist": _inaturalist,
    "Imagenette": _imagenette,
    "LSUN": _lsun,
    "Omniglot": _omniglot,
    "Places365": _places,
    "VOCSegmentation": _voc,
}
"""What is otherwise by the options of a set."""
