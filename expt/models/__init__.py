"""The models. Constructors take `channels`, `image_size` (height, width) and `num_classes`."""

from __future__ import annotations
