"""What the forkserver imports and makes beside that, where many runs share it: else each worker would, in 40 ms."""

from __future__ import annotations

import gc

import numpy.random  # noqa: F401
import PIL.ImageDraw  # noqa: F401
import tensorboard.plugins.hparams.metadata  # noqa: F401
import torch.utils.serialization.config
import torch.utils.tensorboard  # noqa: F401
from PIL import Image

from expt.runs import result

Image.preinit()  # the formats that pictures are written in
"é".encode("latin-1").decode("cp437")  # PIL's font is
result.as_written()
gc.freeze()  # as expt.launch.preload says
