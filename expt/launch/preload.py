"""What the forkserver imports: all that a worker needs, a tenth sooner without the garbage
collector.
"""

from __future__ import annotations

import contextlib
import gc

gc.disable()
try:
    from expt.launch import torch_import

    with torch_import.dataclasses_compiled_late():
        with torch_import.libraries_loaded():
            torch_import.import_meanwhile()
        torch_import.tell_loaded()
        with torch_import.without_cuda(), torch_import.without_source():
            import torch  # noqa: F401
        import expt.worker.main  # noqa: F401

    with contextlib.suppress(
        ImportError
    ):  # torch looks for gloo among all installed packages, once in a process
        from torch.distributed.distributed_c10d import BackendConfig

        BackendConfig("gloo")
finally:
    gc.freeze()  # collections in workers pass these objects by, so that their pages stay shared
    gc.enable()
