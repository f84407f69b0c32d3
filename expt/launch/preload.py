"""What the forkserver imports: all that a worker needs, a tenth sooner without the garbage collector."""

from __future__ import annotations

import gc

gc.disable()
try:
    import expt.worker.main  # noqa: F401
finally:
    gc.freeze()  # collections in workers pass these objects by, so that their pages stay shared
    gc.enable()
