"""Datasets: files on disk to batches on a device.

    files       prepare (the driver, once) and load (each worker) the datasets that come as files
    download    fetch what is missing, through torchvision
    formats     read IDX and CIFAR files, executing nothing from them
    cache       decoded arrays, mapped into memory and shared by all workers and runs
    listing     what lies in a person's folder of images, and how one is decoded
    folder_cache  such a folder, decoded once into the cache
    classes     the names of the classes
    shard       which worker takes which samples: index arithmetic
    loading     Batch, Shard, Loader: what a worker sees
    augment     random crop, flip and cutout of a whole batch
    prefetch    on a GPU, the next batch while this one computes
    memory      the loader of images that fit in memory
    stream      the loader of everything larger
    folder      a person's folder of images, read image by image
    synthetic   images made on the spot
    build       from the configuration to the three loaders

Nothing is imported here: files, download, formats, cache, listing, folder_cache and classes need no torch.
"""

from __future__ import annotations
