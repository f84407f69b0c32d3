"""Where a result comes from: command, versions, commit and uncommitted changes."""

from __future__ import annotations

import functools
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "tensorboard", "numpy")
MAX_DIFF_BYTES = 200_000


def describe() -> dict[str, Any]:
    """The fields of result.json that say how to make it again. Runs git in the current folder."""
    return {"command": command(), "versions": versions(), "git": git_state(Path.cwd())}


def command() -> str:
    """What was typed, as a shell would take it."""
    return " ".join([program(), *map(shlex.quote, sys.argv[1:])])


def program() -> str:
    """The command that this is, without its arguments."""
    name = Path(sys.argv[0]).name
    return "python -m expt" if name == "__main__.py" else name


@functools.cache
def versions() -> dict[str, str]:
    """Version of Python, expt and of each package whose version can change a number."""
    from expt import __version__

    found = {"python": platform.python_version(), "expt": __version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def git_state(folder: Path) -> dict[str, str] | None:
    """The commit checked out in `folder` and the uncommitted changes to it; None outside a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff") or ""
    if len(diff) > MAX_DIFF_BYTES:
        diff = diff[:MAX_DIFF_BYTES] + f"\n... {len(diff) - MAX_DIFF_BYTES} more characters\n"
    return {"commit": commit.strip(), "diff": diff}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, errors="replace", timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
