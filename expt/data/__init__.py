"""Datasets: files on disk to batches on a device.

    kinds/          each kind of dataset: its keys, files and splits
    fingerprint, cache    digests of files, and decoded arrays, shared by all runs
    folders, pictures, formats, columns    files, pictures in them, IDX and CIFAR, tables
    images, memory, custom    samples of each sort, as a Source
    source, build   from the configuration to the loaders of a run
    loader, loading, samples    the two loaders, their options, and reading one by one
    indexing, augment, seeding    the order, augmentation and random numbers of samples

Nothing is imported here: the first two lines, folders and pictures need no torch.
"""

from __future__ import annotations
