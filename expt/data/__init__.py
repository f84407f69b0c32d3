"""Datasets: files on disk to batches on a device.

    files       prepare (the driver, once) and load (each worker) the datasets that come as files
    download    fetch what is missing, through torchvision
    formats     read IDX and CIFAR files, executing nothing from them
    cache       decoded arrays, mapped into memory and shared by all workers and runs
    classes     the names of the classes
    indexing    which worker takes which samples, and in which order: index arithmetic
    loading     Batch, Loader, LoaderOptions: what a worker sees
    augment     random crop, flip and cutout of a whole batch
    transforms  of each training image by itself, torchvision's or one's own
    mixing      mixup and cutmix of whole batches
    prefetch    on a GPU, the next batch while this one computes
    memory      the loaders of images, and of samples of any kind, that fit in memory
    stream      the loader of everything larger
    iterable    the loader of an IterableDataset of known length
    steady_order        whether such a one shuffles, by which val would be trained on
    image_folder        a person's folder of images, read image by image
    image_folder_files  what lies in such a folder, and how one image is decoded
    image_folder_cache  such a folder, decoded once into the cache
    torchvision_files   torchvision's datasets by name: where their files lie, and how they get
    there torchvision_kinds   what is known of each before it is read torchvision_sets    their
    images huggingface         a Hugging Face dataset in a folder, and huggingface_files its files
    pictures            what reads the images of both, one by one text        windows of a text's
    tokens text_files  what lies in a text's file or folder, and which of its bytes train, validate
    and test text_source its windows table       a person's table: which columns are features and
    targets, and what they may hold table_files the columns of a .csv, .npz or .parquet table_source
    its rows as tensors, standardised images_and_noise    those of experiment=gan source      a
    dataset as it is found, before it is split and batched checks      whether settings fit the data
    synthetic   images made on the spot build       from the configuration to the three loaders

Nothing is imported here: files, download, formats, cache, classes and the image folder's files and
cache need no torch."""

from __future__ import annotations
