"""Models that change torch's private parts in their worker, and one that looks at it."""

import inspect
import resource
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel, distributed

from expt.models.vision import MLP

DDP: Any = DistributedDataParallel
SGD: Any = torch.optim.SGD
AUTOGRAD: Any = torch.autograd


class Renamed(MLP):
    """What expt reads or replaces has other names, or is gone; torch's own code knows."""

    def __init__(self, **options: Any) -> None:
        DDP._guarded_forward = DDP._inside_ddp_forward
        _rewrite("_run_ddp_forward", "_inside_ddp_forward", "_guarded_forward")
        del DDP._inside_ddp_forward
        guarded = SGD.step
        SGD.step = lambda self: guarded(self)
        engine = AUTOGRAD.Variable._execution_engine
        AUTOGRAD._engine_run_backward = lambda losses, *args, **kwargs: engine.run_backward(
            losses, *args, **kwargs
        )
        AUTOGRAD.Variable._execution_engine = SimpleNamespace()
        super().__init__(**options)


class Reshaped(MLP):
    """The names are those that expt knows; what is behind them works otherwise."""

    def __init__(self, **options: Any) -> None:
        _rewrite("__init__", "utils.get_optimize_ddp_mode()", "config.suppress_errors")
        super().__init__(**options)


def _rewrite(method: str, old: str, new: str) -> None:
    source = textwrap.dedent(inspect.getsource(getattr(DDP, method)))
    assert old in source
    names = vars(distributed).copy()
    exec(source.replace("super()", "super(DistributedDataParallel, self)").replace(old, new), names)
    setattr(DDP, method, names[method])


class Looking(MLP):
    """Prints whether torch's compiler is imported, and whether freed memory is kept."""

    def forward(self, images: Tensor) -> Tensor:
        """See MLP."""
        if self.training and not hasattr(self, "looked"):
            self.looked = True
            print("torch._dynamo" in sys.modules, _fresh_pages() < 100, flush=True)
        output: Tensor = super().forward(images)  # type: ignore[no-untyped-call]
        return output


def _fresh_pages() -> int:
    np.ones(20_000_000, np.float32)  # more than glibc keeps by itself, however often it is asked
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(20_000_000, np.float32)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
