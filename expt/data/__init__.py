"""Datasets: files on disk to batches on a device.

    kinds/          each kind of dataset: its keys, files and splits
    fingerprint, cache    what the files contain, and decoded arrays, shared by all runs
    image_files, formats, columns    pictures and folders, IDX and CIFAR, tables
    images, masks, custom, samples    samples of each sort, as a Source
    source, build   from the configuration to the loaders of a run
    loading, memory, stream    the loaders: from memory, by processes, of a stream
    indexing, augment    which samples, and what is done to them

Nothing is imported here: the first two lines and image_files need no torch.
"""

from __future__ import annotations
