"""What a process inherits and cannot change later: all of it is the same where a warm server may be
used.

Free of torch: it is looked at before anything is imported, within a few ms.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import resource
import signal
import site
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import expt

# What no library reads as it is imported: where a person sits, and what expt sets in each worker by
# itself. A worker has them as the command has.
OF_THE_TERMINAL = {
    *(
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "COLUMNS",
        "LINES",
        "TERM",
        "COLORTERM",
        "TERM_PROGRAM",
        "TERM_PROGRAM_VERSION",
    ),
    *(
        "TERM_SESSION_ID",
        "VTE_VERSION",
        "WINDOWID",
        "WINDOW",
        "STY",
        "TMUX",
        "TMUX_PANE",
        "DISPLAY",
        "XAUTHORITY",
    ),
    *(
        "SSH_CLIENT",
        "SSH_CONNECTION",
        "SSH_TTY",
        "SSH_AUTH_SOCK",
        "SSH_AGENT_PID",
        "PS1",
        "HISTCMD",
        "LS_COLORS",
    ),
    *(
        "XDG_SESSION_ID",
        "GNOME_TERMINAL_SCREEN",
        "GNOME_TERMINAL_SERVICE",
        "VIRTUAL_ENV_PROMPT",
        "HYDRA_FULL_ERROR",
    ),
    *("CUDA_VISIBLE_DEVICES", "EXPT_CACHE_GB", "EXPT_SIMULATED_GPUS"),
}
# Of /proc/self/status: users and groups, rights, umask, what may not be called, huge pages, whose
# memory; signals that are blocked or ignored.
_STATUS = (
    *(
        "Uid",
        "Gid",
        "Groups",
        "Umask",
        "NoNewPrivs",
        "Seccomp",
        "CapInh",
        "CapPrm",
        "CapEff",
        "CapBnd",
        "CapAmb",
    ),
    *("THP_enabled", "Mems_allowed"),
)
_SIGNALS = ("SigBlk", "SigIgn")
# Each forkserver is deaf to the first two, see expt.launch.forkserver; the third is told apart, see
# expt.launch.warm.
_DEAF_TO = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}
"""The numbers of system calls for which Python has no function."""
_OF_PROCESS, _MOST_NODES = 1, 4096


def fingerprint() -> str | None:
    """This process's surroundings in a few digits; None where they cannot all be known."""
    found = parts()
    return _digest(found) if found else None


def parts() -> dict[str, str]:
    """The same by what it is made of, each part in a few digits; empty where they cannot all be
    known.
    """
    try:
        found = {**_python(), **_process(), **_environment()}
    except (OSError, AttributeError):  # no Linux, or a /proc that is hidden
        return {}
    return {name: _digest(part) for name, part in found.items()}


def _digest(found: object) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:24]


def _environment() -> dict[str, str]:
    return {
        f"variable {key}": value for key, value in os.environ.items() if key not in OF_THE_TERMINAL
    }


def _python() -> dict[str, Any]:
    """The interpreter, and the files of what is imported from, with their times."""
    options = [
        list(sys.flags),
        sys.warnoptions,
        sorted(map(str, getattr(sys, "_xoptions", {}).items())),
    ]
    return {
        "python": [
            sys.version,
            sys.prefix,
            sys.base_prefix,
            os.path.dirname(sys.executable),  # by what name, `python` or `python3`, does not matter
            *_states([os.path.realpath(sys.executable)]),
        ],
        "options": options,
        "expt": _states(sorted(Path(expt.__file__).parent.rglob("*.py"))),
        "torch": _states(_of_torch()),
        "packages": _states(_installed()),
    }


def _of_torch() -> Iterator[Path]:
    for name in ("torch", "torchvision"):
        spec = importlib.util.find_spec(name)  # imports nothing
        if spec and spec.origin:
            folder = Path(spec.origin).parent
            yield from (folder.parent, folder / "__init__.py", folder / "version.py")
            yield from sorted(folder.glob("_C*.so"))
            if (folder / "lib").is_dir():
                yield folder / "lib"


def of_packages() -> list[Path]:
    """The folders of installed packages."""
    return [
        *map(Path, site.getsitepackages()),
        *([Path(site.getusersitepackages())] if site.ENABLE_USER_SITE else []),
    ]


def _installed() -> Iterator[Path]:
    """Those folders, whose time changes as a package comes, goes or is upgraded."""
    for folder in filter(Path.is_dir, of_packages()):
        yield folder
        yield from sorted(folder.glob("*.pth"))


def _states(paths: Iterable[Path | str]) -> list[tuple[str, int, int]]:
    states = [(str(path), os.stat(path)) for path in paths]
    return [(path, state.st_mtime_ns, state.st_size) for path, state in states]


def _process() -> dict[str, Any]:
    """What the kernel holds of this process, and hands down to its children."""
    namespaces = Path("/proc/self/ns")
    root = os.stat("/")
    return {
        "status": _status(),
        "limits": [
            resource.getrlimit(getattr(resource, name))
            for name in sorted(dir(resource))
            if "RLIMIT_" in name
        ],
        "cpus": sorted(os.sched_getaffinity(0)),
        "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)],
        "cgroup": Path("/proc/self/cgroup").read_text(),
        "namespaces": sorted(f"{path.name} {path.readlink()}" for path in namespaces.iterdir()),
        "root": [root.st_dev, root.st_ino],
        "memory policy": _memory_policy(),
        "disk priority": _call(_IOPRIO_GET, _OF_PROCESS, 0),
        "core dumps": _readable("/proc/self/coredump_filter"),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "personality": _readable("/proc/self/personality"),
        "label": _readable("/proc/self/attr/current"),
    }


def _status() -> dict[str, str | int]:
    lines = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    heard = ~sum(1 << number - 1 for number in _DEAF_TO)
    found: dict[str, str | int] = {name: lines[name].strip() for name in _STATUS if name in lines}
    return found | {name: int(lines[name], 16) & heard for name in _SIGNALS}


def _memory_policy() -> list[int] | None:
    """On which NUMA nodes memory is taken, and how (`numactl`)."""
    import ctypes  # late, as below

    mode, nodes = (
        ctypes.c_int(),
        (ctypes.c_ulong * (_MOST_NODES // ctypes.sizeof(ctypes.c_ulong) // 8))(),
    )
    done = _call(_GET_MEMPOLICY, ctypes.byref(mode), nodes, ctypes.c_ulong(_MOST_NODES), None, 0)
    return None if done is None else [done, mode.value, *nodes]


def _call(numbers: Mapping[str, int], *arguments: Any) -> int | None:
    """What a system call gives, -1 where it is not allowed; None where its number is not known."""
    import ctypes  # late: of those that start cold nobody asks

    number = numbers.get(os.uname().machine)
    return None if number is None else int(ctypes.CDLL(None).syscall(number, *arguments))


def _readable(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""
