"""The models, one file each.

Every constructor takes `channels`, `image_size` (height, width) and `num_classes`.
"""

from __future__ import annotations
