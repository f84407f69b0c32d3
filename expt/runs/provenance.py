"""The origin of a result: command, versions, commit and uncommitted changes."""

from __future__ import annotations

import functools
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from expt import machine

PACKAGES = "torch torchvision hydra-core omegaconf tensorboard numpy pydantic pillow timm".split()
MAX_DIFF_BYTES = 200_000


class Provenance(TypedDict, total=False):
    """How to make a result again; `git` is None outside a repository."""

    command: str
    versions: dict[str, str]
    git: dict[str, str] | None
    hardware: dict[str, Any]


def describe() -> Provenance:
    """Return these fields for a run that begins now, in the current folder."""
    return {
        "command": command(),
        "versions": versions(),
        "git": git_state(Path.cwd()),
        "hardware": hardware(),
    }


def of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return these fields of a run's result.json, and its seed, for a checkpoint.

    Uncommitted changes stay behind: weights are passed on to people who are not to read them.
    """
    git = result.get("git")
    found = {key: result.get(key) for key in ("command", "versions", "hardware", "seed")}
    return {**found, "git": git and {"commit": git.get("commit")}}


def differences(then: Mapping[str, Any]) -> list[str]:
    """Return the changes since the run whose result.json is `then`, a line each."""
    now, found = describe(), list[str]()
    known: dict[str, Mapping[str, Any]] = {"versions": versions(), "hardware": hardware()}
    for kind, after in known.items():
        before = then.get(kind) or {}
        pairs = {key: (before.get(key), after.get(key)) for key in sorted({*before, *after})}
        changed = [f"{key} {x} then, {y} now" for key, (x, y) in pairs.items() if x != y]
        if changed:
            found.append(f"{kind}: {'; '.join(changed)}")
    was, is_now = then.get("git") or {}, now["git"] or {}
    if was.get("commit") != is_now.get("commit"):
        found.append(f"git commit: {_short(was)} then, {_short(is_now)} now")
    elif was.get("diff") != is_now.get("diff"):
        found.append("git: the uncommitted changes are not those of then")
    return found


def _short(git: Mapping[str, str]) -> str:
    return git["commit"][:12] if git else "none"


@functools.cache
def hardware() -> dict[str, Any]:
    """Return the processor, its cores that may be used, the memory, and the GPUs."""
    cpu = _after_colon(Path("/proc/cpuinfo"), "model name")
    memory_kib = int((_after_colon(Path("/proc/meminfo"), "MemTotal") or "0").split()[0])
    return {
        "cpu": cpu or platform.processor() or platform.machine(),
        "cores": machine.usable_cpus(),
        "memory_gib": round(memory_kib / 2**20, 1),
        "gpus": machine.gpu_names(),
    }


def _after_colon(path: Path, name: str) -> str | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def command() -> str:
    """Return the typed command, for a shell."""
    path = Path(sys.argv[0])
    program = f"python -m {path.parent.name}" if path.name == "__main__.py" else path.name
    return " ".join([program, *map(shlex.quote, sys.argv[1:])])


def program() -> str:
    """Return how expt is started here, without arguments."""
    return "expt" if Path(sys.argv[0]).name == "expt" else "python -m expt"


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python, expt and the packages that can change a number."""
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
    """Return the commit and the uncommitted changes of `folder`; None outside a repository."""
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
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
