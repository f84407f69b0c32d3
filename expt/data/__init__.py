"""Datasets: files on disk to batches on a device.

    files       prepare (the driver, once) and load (each worker) the datasets that come as files
    download    fetch what is missing, through torchvision
    formats     read IDX and CIFAR files, executing nothing from them
    cache       decoded arrays, mapped into memory and shared by all workers and runs
    classes     the names of the classes
    shard       which worker takes which samples: index arithmetic
    loading     Batch, Shard, Loader: what a worker sees
    memory      the loader of images that fit in memory
    stream      the loader of everything larger
    folder      a person's folder of images
    synthetic   images made on the spot
    build       from the configuration to the three loaders

Nothing is imported here: files, download, formats, cache and classes need no torch.
"""
