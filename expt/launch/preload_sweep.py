"""What the forkserver imports and makes beside that, where many runs share it: else each worker
would, in 40 ms.
"""

from __future__ import annotations

import encodings.ascii
import encodings.latin_1  # noqa: F401
import io

import numpy.random  # noqa: F401
import PIL.ImageDraw  # noqa: F401
import tensorboard.plugins.hparams.metadata  # noqa: F401
import torch
import torch.utils.serialization.config
import torch.utils.tensorboard
from PIL import Image

from expt.runs import result

Image.preinit()  # the formats that pictures are written in
"é".encode("latin-1").decode("cp437")  # PIL's font is
result.as_written()


def _load_once() -> None:
    """Read a checkpoint, as each run does for its test: what torch makes when it reads its first
    takes 6 ms.
    """
    torch.save({"model": {"weight": torch.zeros(1)}}, file := io.BytesIO())
    file.seek(0)
    torch.load(file, map_location="cpu", weights_only=True)


_load_once()
