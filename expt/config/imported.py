"""The person's own modules in this process, each with the source that it was imported from.

`import expt` reads this module: it needs only Python's library.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib
import importlib.machinery
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

PREFIX = "expt_main_"
"""What the names of modules of `__main__`'s classes start with; see expt.config.user_code."""
_read: dict[str, str] = {}
"""For each file that was imported, the hash of what it held; empty where that is not known."""
_lock = threading.RLock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def install_finder() -> None:
    """Let this process import custom modules as their source is now, and remember that source.

    Python takes a cached .pyc for that of any file of the same size and, in whole seconds, the same
    time, and `cp -p`, rsync and git bring such files. For custom modules a checksum of the source
    stands in place of the time.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
        began_s = _process_began_s() if (files := own_files()) else 0.0
        for file in files.values():
            is_older = os.stat(file).st_ctime < began_s
            _read[file] = (hash_now(file) or "") if is_older else ""


def _process_began_s() -> float:
    """Return when this process was started, by time.time, to a hundredth of a second."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


class _Finder:
    """Has the other finders find a module, and changes how a custom one is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in [each for each in sys.meta_path if each is not self]:
            if spec := finder.find_spec(name, path, target):
                loader = spec.loader
                if type(loader) is SourceFileLoader and not is_installed(loader.path):
                    spec.loader = _ByContent(loader.name, loader.path)
                return spec
        return None


class _ByContent(SourceFileLoader):
    def path_stats(self, path: str) -> Mapping[str, Any]:
        source = self.get_data(path)
        _read[os.path.abspath(path)] = _hash(source)
        return {"mtime": zlib.crc32(source), "size": len(source)}


_FINDER = _Finder()


def is_installed(path: Path | str) -> bool:
    """Return whether a file is of Python, expt or a package, and not the person's own."""
    return f"{path}/".startswith(_installed(tuple(map(str, sys.path))))


@functools.lru_cache(1)
def _installed(path: tuple[str, ...]) -> tuple[str, ...]:
    expt = Path(__file__).parents[1]
    own = (os.path.dirname(os.__file__), str(expt), str(expt.with_name("hydra_plugins")))
    of_packages = [each for each in path if each.endswith(("site-packages", "dist-packages"))]
    return tuple(f"{folder}/" for folder in (*own, *of_packages))


def _hash(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:12]


def hash_now(path: str) -> str | None:
    """Return the hash of what the file holds; None where it cannot be read."""
    try:
        return _hash(Path(path).read_bytes())
    except OSError:
        return None


def own_files() -> dict[str, str]:
    """Return the person's own modules that are imported, by name, and the absolute file of each.

    Left out are `__main__`, what is made of its classes, and what no importer has loaded.
    """
    found, installed = dict[str, str](), _installed(tuple(map(str, sys.path)))
    for name, module in sys.modules.copy().items():  # a thread may import meanwhile
        spec = getattr(module, "__spec__", None) if isinstance(module, ModuleType) else None
        if not isinstance(spec, importlib.machinery.ModuleSpec) or not spec.has_location:
            continue
        file = getattr(spec.loader, "archive", None) or str(spec.origin)  # that of a zip
        is_made = name.startswith((PREFIX, "__"))
        if not is_made and not file.startswith(installed) and os.path.isfile(file):
            found[name] = os.path.abspath(file)
    return found


def as_imported() -> dict[str, dict[str, str]]:
    """Return the person's own modules, by name, each with its file and the hash of its source.

    Code that was loaded past `sys.modules` has its file for a name. A file is relative where it is
    below the current folder, a hash empty where it is not known.
    """
    here, found = os.getcwd() + os.sep, dict[str, dict[str, str]]()
    by_name = own_files()
    others = _files_past_modules().difference(by_name.values())
    for name, file in (*by_name.items(), *((each.removeprefix(here), each) for each in others)):
        then = _read[file] if file in _read else hash_now(file) or ""
        found[name] = {"file": file.removeprefix(here), "hash": then}
    return found


def _files_past_modules() -> set[str]:
    """Return the person's own files of functions whose module is not in `sys.modules`."""
    modules = {id(vars(each)) for each in sys.modules.copy().values() if hasattr(each, "__dict__")}
    functions = [each for each in gc.get_objects() if type(each) is FunctionType]
    code = {one.__code__.co_filename for one in functions if id(one.__globals__) not in modules}
    files = map(os.path.abspath, code)
    return {file for file in files if not is_installed(file) and os.path.isfile(file)}


def edited() -> dict[str, str]:
    """Return those of the person's own modules whose file may have changed since its import."""
    changed = {file for file, then in _read.items() if hash_now(file) != then}
    return {name: file for name, file in own_files().items() if file in changed} if changed else {}


@contextlib.contextmanager
def as_on_disk() -> Iterator[None]:
    """While entered, import the person's own modules anew, as a new process does.

    Afterwards the modules of this process are those that it had; objects made keep their classes.
    """
    with _lock:
        before = {name: sys.modules.pop(name) for name in own_files()}
        read = dict(_read)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            for name in own_files():
                del sys.modules[name]
            for name, module in before.items():
                sys.modules[name] = module
                above, _, last = name.rpartition(".")
                if above in sys.modules:
                    setattr(sys.modules[above], last, module)
            _read.clear()
            _read.update(read)
