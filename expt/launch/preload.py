"""What the forkserver imports: all that a worker needs, a tenth sooner without the garbage collector."""

from __future__ import annotations

import contextlib
import gc

gc.disable()
try:
    import expt.worker.main  # noqa: F401

    with contextlib.suppress(ImportError):  # torch looks for gloo among all installed packages, once in a process
        from torch.distributed.distributed_c10d import BackendConfig

        BackendConfig("gloo")
finally:
    gc.freeze()  # collections in workers pass these objects by, so that their pages stay shared
    gc.enable()
