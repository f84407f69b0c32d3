"""What the forkserver imports and makes, so that no worker has to.

The imports of this module are for every run.
"""

from __future__ import annotations

import io

from torch.distributed.distributed_c10d import BackendConfig

import expt.worker.main  # noqa: F401

BackendConfig("gloo")  # torch looks for it among all installed packages, once in a process


def for_sweep() -> None:
    """Load what many runs need besides: else each worker would, in 40 ms."""
    import encodings.ascii
    import encodings.latin_1  # noqa: F401

    import numpy.random  # noqa: F401
    import PIL.ImageDraw  # noqa: F401
    import tensorboard.plugins.hparams.metadata  # noqa: F401
    import torch.utils.serialization.config
    import torch.utils.tensorboard
    from PIL import Image

    from expt.runs import result

    Image.preinit()  # the formats that pictures are written in
    "é".encode("latin-1").decode("cp437")  # PIL's font is
    result.as_written()
    # Read a checkpoint, as each run does for its test: torch's first takes 6 ms.
    torch.save({"model": {"weight": torch.zeros(1)}}, file := io.BytesIO())
    file.seek(0)
    torch.load(file, map_location="cpu", weights_only=True)


def for_sharding() -> None:
    """Load what sharded models need: else each worker would, in 2 seconds of a core."""
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor

    # imports torch._dynamo, by which fully_shard keeps its hooks from being compiled
    torch.compiler.reset()
