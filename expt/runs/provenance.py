"""The origin of a result: command, versions, commit and uncommitted changes."""

from __future__ import annotations

import contextlib
import functools
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from expt import machine
from expt.errors import first_line, listed, warn

PACKAGES = "torch torchvision hydra-core omegaconf tensorboard numpy pydantic pillow timm".split()
MAX_DIFF_BYTES = 200_000


class Provenance(TypedDict, total=False):
    """How to make a result again; `git` is None outside a repository.

    `distributions` are those that a run had imported at its end, by version.
    """

    command: str
    versions: dict[str, str]
    distributions: dict[str, str]
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
    others = then.get("distributions") or {}
    here = {key: version for key in others if (version := version_of(key))}
    then = {**then, "versions": {**others, **(then.get("versions") or {})}}
    known: dict[str, Mapping[str, Any]] = {}
    known |= {"versions": {**here, **versions()}, "hardware": hardware()}
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
    return [*found, f"git: then {was['problem']}"] if "problem" in was else found


def _short(git: Mapping[str, str]) -> str:
    return git.get("commit", "none")[:12]


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
    return found | {key: version for key in PACKAGES if (version := version_of(key))}


def version_of(package: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def imported_versions() -> dict[str, str]:
    """Return the versions of all distributions that this process has imported modules from.

    The names of folders are read: importlib.metadata takes 0.8 s for it.
    """
    tops, found = {name.partition(".")[0] for name in sys.modules.copy()}, dict[str, str]()
    for info in (info for at in sys.path for info in sorted(Path(at or ".").glob("*.dist-info"))):
        name, _, version = info.stem.partition("-")
        if {name, name.lower()} & tops or _top_level(info) & tops:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return found


def _top_level(info: Path) -> set[str]:
    """Return the names of the modules and packages that a distribution has installed."""
    for file in ("top_level.txt", "RECORD"):
        with contextlib.suppress(OSError):
            lines = (info / file).read_text(errors="replace").splitlines()
            firsts = (re.match(r"(\w+)(/|\.py,|$)", line) for line in lines)
            return {first[1] for first in firsts if first}
    return set()


@functools.cache
def git_state(folder: Path) -> dict[str, str] | None:
    """Return the commit and the uncommitted changes of `folder`; None outside a repository.

    A `problem` says which of them it lacks, and why.
    """
    commit, why = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        if not any((at / ".git").exists() for at in (folder, *folder.parents)):
            return None
        return {"problem": f"the commit is not recorded: {why}"}
    options = ("--no-color", "--no-ext-diff", "--submodule=diff")
    diff, why = _git(folder, "diff", "HEAD", *options)
    found = {"commit": commit.strip(), "diff": diff or ""}
    if diff is None:
        found["problem"] = f"the uncommitted changes are not recorded: {why}"
    elif len(diff) > MAX_DIFF_BYTES:
        more = f"{len(diff) - MAX_DIFF_BYTES} more characters"
        found["diff"] = f"{diff[:MAX_DIFF_BYTES]}\n... {more}\n"
        found["problem"] = f"the uncommitted changes are not recorded whole: {more}"
    return found


@functools.cache
def warn_of_unrecorded(folder: Path, files: tuple[Path, ...]) -> None:
    """Warn once of the source in `folder` that its state in git lacks.

    `files` are a run's own modules; git may ignore them, or not track them.
    """
    for line in _unrecorded(folder, files):
        warn(line)


def _unrecorded(folder: Path, files: Sequence[Path]) -> list[str]:
    if not (git := git_state(folder)):
        return []
    lines = [f"git: {git['problem']}"] if "problem" in git else []
    inside = [file for file in files if "commit" in git and file.is_relative_to(folder)]
    tracked, _ = _git(folder, "ls-files", "-z", "--", *map(str, inside)) if inside else (None, "")
    known = {folder / name for name in (tracked or "").split("\0")}
    if lacking := [str(x.relative_to(folder)) for x in inside if x not in known]:
        lines.append(
            f"git does not track {listed(lacking)}, and the record has hashes of source only"
        )
    return lines if tracked is not None or not inside else lines[:1]


def _git(folder: Path, *arguments: str) -> tuple[str | None, str]:
    """Return the output of a command of git's, or None and why there is none."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=5)
    except FileNotFoundError:
        return None, "git is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"git {arguments[0]} failed ({first_line(error)})"
    if done.returncode != 0:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        return None, f"git {arguments[0]} failed ({said})"
    return done.stdout, ""
