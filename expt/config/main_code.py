"""Classes of a notebook or a script, as modules that any process can import; no torch.

See expt.python.main_module for what is in them.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from expt.config import user_code
from expt.config.user_code import PREFIX

if TYPE_CHECKING:
    from expt.config.schema import RunConfig


def is_of_main(target: str) -> bool:
    """Return whether a dotted name is of such a module."""
    return target.startswith(PREFIX)


def write(digest: str, text: str) -> str:
    """Have the module of this digest importable, here and in processes started from here.

    Returns its name.
    """
    name = PREFIX + digest[:12]
    file = _written() / f"{name}.py"
    if not file.exists():
        file.write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
    return name


@functools.cache
def _written() -> Path:
    """Return a folder of this process, among those that it imports from."""
    folder = Path(tempfile.mkdtemp(prefix="expt-main-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sys.path.append(str(folder))
    return folder


def keep(config: RunConfig, folder: Path) -> None:
    """Copy what a run's classes need of such modules into `folder`, for whoever comes later."""
    for name, file in user_code.own_modules(_of_main(user_code.targets(config))).items():
        if is_of_main(name) and file.parent != folder:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / file.name)


def _of_main(targets: Sequence[str]) -> list[str]:
    return [target for target in targets if is_of_main(target)]


def find_kept(folder: Path) -> None:
    """Let this process, and those it starts, import what `keep` has copied into `folder`."""
    if os.path.isdir(folder) and (path := str(folder.absolute())) not in sys.path:
        sys.path.append(path)
        importlib.invalidate_caches()
