"""Which tests belong to a module: its own file, those of others that import it, then the runs that it has a part in."""

from __future__ import annotations

import re
from collections.abc import Iterator

from scripts.mutation.changes import ROOT

RUNS = "tests/integration/test_run.py"
# By the start of a module's path: where whole runs are its test.
WHOLE_RUNS = {
    "training/shared_memory": ("tests/integration/test_shared_memory.py",),
    "training": ("tests/integration/test_fast_paths.py", "tests/integration/test_numbers.py"),
    "worker/watchdog": ("tests/faults/test_watchdogs.py",),
    "worker/divergence": ("tests/faults/test_watchdogs.py",),
    "worker/fault": ("tests/faults/test_watchdogs.py",),
    "worker/diagnosis": ("tests/faults/test_watchdogs.py", RUNS),
    "worker": (RUNS, "tests/integration/test_resume.py"),
    "launch/torchrun": (RUNS,),
    "launch/rendezvous": (RUNS,),
    "launch/submitit_jobs": ("tests/integration/test_cluster.py",),
    "launch/pool": ("tests/integration/test_sweep.py", "tests/faults/test_sweeps.py"),
    "launch": ("tests/faults/test_workers.py", "tests/faults/test_signals.py"),
    "runs/view": (),
    "runs/checkpoint": ("tests/integration/test_resume.py",),
    "runs/resume": ("tests/integration/test_resume.py",),
    "runs": ("tests/integration/test_rerun.py", "tests/integration/test_resume.py"),
    "config": ("tests/integration/test_rerun.py",),
    "data": ("tests/integration/test_numbers.py",),
}


def tests_of(module: str) -> list[str]:
    """Files of tests, those that tell soonest first; `module` is a path such as expt/runs/resume.py."""
    name = module.removeprefix("expt/").removesuffix(".py")
    package, _, last = name.partition("/")
    own = ROOT / "tests" / package / f"test_{last.rpartition('/')[2]}.py"
    found = [str(own.relative_to(ROOT))] if own.exists() else []
    found += sorted(set(_importing(name)) - {*found})
    longest = max((key for key in WHOLE_RUNS if name.startswith(key)), key=len)
    return [*found, *(test for test in WHOLE_RUNS[longest] if test not in found)]


def _importing(name: str) -> Iterator[str]:
    package, _, last = f"expt/{name}".replace("/", ".").rpartition(".")
    words = rf"^from {package}\.{last} |^from {package} import .*\b{last}\b|^import {package}\.{last}$"
    imports = re.compile(words, re.MULTILINE)
    for path in (ROOT / "tests").rglob("test_*.py"):
        inside = path.relative_to(ROOT)
        if inside.parts[1] not in ("integration", "faults", "gpu") and imports.search(path.read_text()):
            yield str(inside)
