"""What the forkserver imports and looks up: all that a worker needs, a tenth sooner without the garbage collector."""

from __future__ import annotations

import gc

gc.disable()
try:
    import expt.data.formats
    import expt.launch.processes
    import expt.worker.main  # noqa: F401
    from expt.runs import result
    from expt.training.patches import backends

    result.get_ready_to_read()
    backends.look_up_once()
finally:
    gc.freeze()  # collections in workers pass these objects by, so that their pages stay shared
    gc.enable()
