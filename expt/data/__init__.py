"""Datasets: files on disk to batches on a device.

    kind, kinds/    what a kind of dataset is, and each of them: its keys, files and parts
    cache, checksums, download    decoded arrays, digests and files, shared by all runs
    image_files, formats, columns    pictures and folders, IDX and CIFAR, tables
    images, masks, rows, windows, custom, samples    samples of each sort, as a Source
    source, build, evaluation    from the configuration to the loaders of a run
    loading, memory, stream, iterable    the loaders: from memory, by processes, of a stream
    indexing, augment, transforms, mixing    which samples, and what is done to them

Nothing is imported here: the first two lines and image_files need no torch.
"""

from __future__ import annotations
