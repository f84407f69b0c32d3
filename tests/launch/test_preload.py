"""What workers find done when they are forked."""

from __future__ import annotations

import json
from pathlib import Path

from expt.launch import forkserver, processes

SCRIPT = """
import json, sys
imported = list(sys.modules)
from torch.distributed import Backend
from expt.runs import result
looked_up = getattr(Backend._ensure_backend_registered, "cache_info", None)
told = [imported, result._as_written.cache_info().currsize, looked_up() if looked_up else None]
open({out!r}, "w").write(json.dumps(told))
"""


def test_workers_are_forked_with_all_that_they_need(tmp_path: Path) -> None:
    forkserver.warm(forkserver.SWEEP_MODULES)
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT.format(out=str(out)))
    printed = [tmp_path / name for name in ("stdout", "stderr")]
    process = processes.start("runpy:run_path", [str(script)], env={}, stdout=printed[0], stderr=printed[1])
    process.join()
    assert process.exitcode == processes.FINISHED, printed[1].read_text()
    imported, readers, looked_up = json.loads(out.read_text())
    before_the_fork = imported[: imported.index(forkserver.SWEEP_MODULES[0]) + 1]
    assert {"expt.worker.main", "expt.launch.processes", "expt.data.formats"} < {*before_the_fork}
    assert readers == 1, "of records"
    assert looked_up is None or looked_up[-1] == 2, "gloo and NCCL"
