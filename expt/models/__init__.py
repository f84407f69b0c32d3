"""The models; constructors take `channels`, `image_size` (height, width) and `num_classes`."""
