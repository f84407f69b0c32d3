"""Which tests belong to a module: its own file and others that import it, or the runs that it has a
part in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from scripts.mutation.changes import ROOT

RUN, NUMBERS, RESUME, RERUN = (
    f"tests/integration/test_{name}.py" for name in ("run", "numbers", "resume", "rerun")
)
WORKERS, WATCHDOGS = (f"tests/faults/test_{name}.py" for name in ("workers", "watchdogs"))
FILES, LOADING, FOLDERS = (
    f"tests/data/test_{name}.py" for name in ("files", "loading", "image_folder_cache")
)
TABLE, OWN_SAMPLES = "tests/data/test_table.py", "tests/data/test_own_samples.py"
ONE_WORKER, PATCHES = "tests/worker/test_run.py", "tests/training/test_patches.py"
FAST_PATHS = "tests/integration/test_numbers.py"
# For what has no file of tests of its own, by the start of its path.
INSTEAD: dict[str, tuple[str, ...]] = {
    "config": ("tests/config/test_parse.py",),
    "data": (LOADING, FILES),
    "data/changes": ("tests/worker/test_custom_state.py", OWN_SAMPLES),
    "data/memory": (TABLE, LOADING),
    "data/rows": (TABLE, "tests/data/test_table_sources.py"),
    "data/samples": ("tests/data/test_streams.py", OWN_SAMPLES, "tests/data/test_own_collate.py"),
    "data/table_files": (TABLE, "tests/data/test_table_sources.py"),
    "data/kinds/image_folder": (FOLDERS, "tests/data/test_build.py"),
    "launch": (WORKERS,),
    "launch/torchrun": (f"{RUN}::test_torchruns_workers_share_one_run_folder",),
    "runs/provenance": (RERUN,),
    "runs/continuing": (RESUME,),
    "runs/lineage": (RESUME,),
    "runs/tags": ("tests/integration/test_dashboard.py",),
    "runs/view": ("tests/command/test_report.py",),
    "runs": (RERUN,),
    "training": (NUMBERS, FAST_PATHS),
    "training/loop": (NUMBERS, FAST_PATHS, WATCHDOGS),
    "training/patches": (
        "tests/training/test_optim.py",
        PATCHES,
        "tests/worker/test_build.py",
        FAST_PATHS,
    ),
    "training/shared_memory": ("tests/integration/test_numbers.py",),
    "worker": (ONE_WORKER, RUN, RESUME),
    "worker/diagnosis": (RUN, WATCHDOGS),
    "worker/fault": (WORKERS, WATCHDOGS),
    "worker/steps": (ONE_WORKER, RUN),
    "worker/watchdog": (WATCHDOGS,),
}
# For what its own tests see in part.
BESIDE: dict[str, tuple[str, ...]] = {
    "runs/continuing": (RESUME, "tests/worker/test_continue.py"),
    "training/loop": (NUMBERS, "tests/worker/test_phases.py"),
    "config/rules": ("tests/config/test_parse.py",),
    "launch/workers": (WORKERS,),
    "worker/build": (ONE_WORKER,),
    "worker/run": (RESUME, NUMBERS),
    "worker/checkpoints": (RESUME,),
    "training/shared_memory": ("tests/integration/test_numbers.py",),
}


def tests_of(module: str) -> list[str]:
    """Files of tests, those that tell soonest first; `module` is a path such as
    expt/runs/continuing.py, or such a file.
    """
    if module.startswith("tests/"):
        return [module]
    name = module.removeprefix("expt/").removesuffix(".py")
    package, _, last = name.partition("/")
    own = ROOT / "tests" / package / f"test_{last.rpartition('/')[2]}.py"
    found = [str(own.relative_to(ROOT))] if own.exists() else []
    found += sorted({*_importing(name)} - {*found})
    if own.exists():
        more = BESIDE.get(name, ())
    else:
        more = INSTEAD[max((key for key in INSTEAD if name.startswith(key)), key=len)]
    return [*found, *(test for test in more if test not in found)]


def _importing(name: str) -> Iterator[str]:
    """The files of tests that import the module itself, but for those of whole runs."""
    package, _, last = f"expt/{name}".replace("/", ".").rpartition(".")
    words = (
        rf"^from {package}\.{last} |^from {package} import .*\b{last}\b|^import {package}\.{last}$"
    )
    imports = re.compile(words, re.MULTILINE)
    for path in (ROOT / "tests").rglob("test_*.py"):
        inside = path.relative_to(ROOT)
        if inside.parts[1] not in ("integration", "faults", "gpu") and imports.search(
            path.read_text()
        ):
            yield str(inside)
