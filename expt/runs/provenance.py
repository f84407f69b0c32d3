"""The origin of a result: command, versions, commit and uncommitted changes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from typing_extensions import TypedDict

from expt import machine
from expt.config import own_code
from expt.errors import first_line, listed, warn_once
from expt.gpus import gpu_names

PACKAGES = "torch torchvision hydra-core omegaconf tensorboard numpy pydantic pillow timm".split()
MAX_DIFF_BYTES = 200_000
LOOK_S = 5
"""Seconds between two looks at git, which takes a tenth of a short run of a sweep."""
# Whatever a person has git show instead, and a textconv may decrypt.
_DIFF = "--no-color --no-ext-diff --no-textconv --submodule=diff -U3".split()
_DIFF += ["--src-prefix=a/", "--dst-prefix=b/"]


class Provenance(TypedDict, total=False):
    """How to make a result again; `git` is None outside a repository.

    `distributions` are those that a run had imported at its end, by version; `repositories` are
    others than that of the current folder which the person's own modules lie in, by their folders.
    """

    command: str
    versions: dict[str, str]
    distributions: dict[str, str]
    git: dict[str, str] | None
    repositories: dict[str, dict[str, str]]
    hardware: dict[str, Any]


def describe(files: Iterable[Path] = ()) -> Provenance:
    """Return these fields for a run of the modules in `files` that begins now, in this folder.

    Warns as `in_git` does.
    """
    return {
        "command": command(),
        "versions": versions(),
        **_recent_git(Path.cwd(), tuple(files), int(time.monotonic() / LOOK_S)),
        "hardware": hardware(),
    }


@functools.lru_cache(maxsize=16)
def _recent_git(_folder: Path, files: tuple[Path, ...], _look: int) -> Provenance:
    """Return `in_git` of these files from the current folder, looked at once for each `_look`."""
    return in_git(files)


def for_checkpoint(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return these fields of a run's result.json, and its seed, for a checkpoint.

    Uncommitted changes stay behind: weights are passed on to people who are not to read them.
    """
    git = result.get("git")
    found = {key: result.get(key) for key in ("command", "versions", "hardware", "seed")}
    return {**found, "git": git and {"commit": git.get("commit")}}


def differences(then: Mapping[str, Any]) -> list[str]:
    """Return the changes since the run whose result.json is `then`, a line each."""
    machines = _changes(then.get("hardware") or {}, hardware())
    changes = {"versions": other_versions(then), "hardware": machines}
    found = [f"{kind}: {'; '.join(lines.values())}" for kind, lines in changes.items() if lines]
    git, git_now = then.get("git") or {}, git_state(Path.cwd()) or {}
    before, after = (state.get("commit", "none") for state in (git, git_now))
    if before != after:
        found.append(f"git commit: {before[:12]} then, {after[:12]} now")
    elif git.get("diff") != git_now.get("diff"):
        found.append("git: the uncommitted changes are not those of then")
    if "problem" in git:
        found.append(f"git: then {git['problem']}")
    return found


def other_versions(then: Mapping[str, Any]) -> dict[str, str]:
    """Return both versions of each distribution that has another one now than in that run."""
    others = then.get("distributions") or {}
    here = {key: version for key in others if (version := version_of(key))}
    return _changes({**others, **(then.get("versions") or {})}, {**here, **versions()})


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    pairs = {key: (before.get(key), after.get(key)) for key in sorted({*before, *after})}
    return {key: f"{key} {x} then, {y} now" for key, (x, y) in pairs.items() if x != y}


@functools.cache
def hardware() -> dict[str, Any]:
    """Return the processor, its cores that may be used, the memory, and the GPUs."""
    cpu = machine.facts("/proc/cpuinfo").get("model name")
    memory_kib = int(machine.facts("/proc/meminfo").get("MemTotal", "0").split()[0])
    return {
        "cpu": cpu or platform.processor() or platform.machine(),
        "cores": machine.usable_cpus(),
        "memory_gib": round(memory_kib / 2**20, 1),
        "gpus": gpu_names(),
    }


def command() -> str:
    """Return the typed command, for a shell."""
    path = Path(sys.argv[0])
    program = ["python", "-m", path.parent.name] if path.name == "__main__.py" else [path.name]
    return shlex.join([*program, *sys.argv[1:]])


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
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def imported_versions() -> dict[str, str]:
    """Return the versions of all distributions that this process has imported modules from.

    The names of folders are read: importlib.metadata takes 0.8 s for it.
    """
    imported = {name.partition(".")[0] for name in [*sys.modules]}
    found = dict[str, str]()
    for folder in sys.path:
        for stem, info in _installed_in(str(folder)):
            name, _, version = stem.partition("-")
            is_imported = {name, name.lower()} & imported or _top_level(info) & imported
            if is_imported or _is_edited(info):
                version = version.partition("-")[0] or metadata.PathDistribution(info).version
                found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return found


@functools.cache
def _installed_in(folder: str) -> list[tuple[str, Path]]:
    """Return the metadata folders, and their stems, of distributions in a folder of `sys.path`."""
    infos = sorted((*Path(folder).glob("*.dist-info"), *Path(folder).glob("*.egg-info")))
    return [(info.stem, info) for info in infos]


def _is_edited(info: Path) -> bool:
    """Return whether modules were imported from a distribution of `pip install --editable`."""
    folder = _edited_in(info)
    own = own_code.own_files().values() if folder else ()
    return any(file.startswith(f"{folder}/") for file in own)


@functools.cache
def _edited_in(info: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        known = json.loads((info / "direct_url.json").read_bytes())
        if known.get("dir_info", {}).get("editable"):
            return unquote(urlsplit(known["url"]).path)
    return None


@functools.cache
def _top_level(info: Path) -> frozenset[str]:
    """Return the names of the modules and packages that a distribution has installed."""
    for file in ("top_level.txt", "RECORD"):
        with contextlib.suppress(OSError):
            text = (info / file).read_text(errors="replace")
            return frozenset(re.findall(r"^\w+(?=/|\.py,|$)", text, re.MULTILINE))
    return frozenset()


def git_state(folder: Path) -> dict[str, str] | None:
    """Return the commit and the uncommitted changes of `folder`; None outside a repository.

    A `problem` says which of them it lacks, and why. Bytes of the changes that are not UTF-8 are
    as by "surrogateescape".
    """
    commit, why = _git(folder, "log", "-1", "--no-show-signature", "--format=%H")
    if commit is None:
        if _repository_of(folder) is None:
            return None
        return {"problem": f"the commit is not recorded: {why}"}
    diff, lacks = _uncommitted(folder)
    found = {"commit": commit.strip(), "diff": diff}
    if lacks:
        found["problem"] = f"the uncommitted changes are not recorded{lacks}"
    return found


def _uncommitted(folder: Path) -> tuple[str, str]:
    """Return the uncommitted changes as far as they fit, and the words for those left out."""
    diff, why = _git(folder, "diff", "HEAD", *_DIFF)
    if diff is None:
        return "", f": {why}"
    if len(diff) > MAX_DIFF_BYTES:
        more = f"{len(diff) - MAX_DIFF_BYTES} more characters"
        return f"{diff[:MAX_DIFF_BYTES]}\n... {more}\n", f" whole: {more}"
    if "\nBinary files " not in diff:
        return diff, ""
    with_binary, _ = _git(folder, "diff", "HEAD", "--binary", *_DIFF)
    if with_binary is not None and len(with_binary) <= MAX_DIFF_BYTES:
        return with_binary, ""
    names = re.findall(r"\nBinary files .* and (?:b/)?(.*) differ", diff)
    return diff, f" whole: binary {listed(names)}"


def _repository_of(folder: Path) -> Path | None:
    return next((at for at in (folder, *folder.parents) if (at / ".git").exists()), None)


def in_git(files: Iterable[Path]) -> Provenance:
    """Return the state of the current folder in git, and of other repositories of source.

    `files` are a run's own modules. Warns once of those whose text is in none of these states: git
    may ignore them, or not track them.
    """
    here = _repository_of(Path.cwd()) or Path.cwd()
    groups: dict[Path, list[Path]] = {here: []}
    for file in sorted({file.resolve() for file in files}):
        groups.setdefault(_repository_of(file.parent) or here, []).append(file)
    states = {top: git_state(top) for top in groups}
    for state in states.values():
        if state and "problem" in state:
            warn_once(f"git: {state['problem']}")
    lacking = [file for top in groups for file in _untracked(top, groups[top], states[top])]
    if lacking and any(states.values()):
        names = listed([os.path.relpath(file) for file in lacking])
        warn_once(
            f"git does not track {names} or its changes; the record has hashes of source only"
        )
    found: Provenance = {"git": states.pop(here)}
    below = f"{Path.cwd()}{os.sep}"
    if others := {str(top).removeprefix(below): state for top, state in states.items() if state}:
        found["repositories"] = others
    return found


def _untracked(top: Path, files: Sequence[Path], state: Mapping[str, str] | None) -> list[Path]:
    """Return the files whose text is neither in the commit nor in the changes of a repository."""
    inside = [str(file) for file in files if file.is_relative_to(top)]
    if not state or not inside:
        return [*files]
    if "commit" not in state:
        return []  # its problem says so
    listing, _ = _git(top, "ls-files", "-z", "-v", "--", *inside)
    if listing is None:
        return []
    # Others than these are to be taken as unchanged: "h" and "S".
    known = {top / line[2:] for line in listing.split("\0") if line.startswith(("H", "M"))}
    return [file for file in files if file not in known]


def _git(folder: Path, *arguments: str) -> tuple[str | None, str]:
    """Return the output of a command of git's, or None and why there is none."""
    command = ["git", "-C", str(folder), "-c", "diff.relative=false", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=5)
    except FileNotFoundError:
        return None, "git is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"git {arguments[0]} failed ({first_line(error)})"
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        return None, f"git {arguments[0]} failed ({said.splitlines()[0]})"
    return done.stdout.decode(errors="surrogateescape"), ""
