"""The code of custom classes: which files it is in, a hash of them, and how it is imported.

A class's code is its module, and what that imports of the person's own; what is reached otherwise,
as by importlib.import_module, is not seen. Free of torch.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.machinery
import os
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from expt.config.constraints import plain

if TYPE_CHECKING:
    from expt.config.schema import RunConfig

PREFIX = "expt_main_"
"""What the names of modules of `__main__`'s classes start with; see expt.config.main_code."""


def targets(settings: RunConfig | Mapping[str, Any]) -> tuple[str, ...]:
    """Return the dotted names of custom classes in a configuration or a record of one.

    Those among the arguments of others are among them.
    """
    return tuple(_named(plain(settings)))


def _named(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        own = node.get("target") if node.get("name") == "_target_" else node.get("_target_")
        if isinstance(own, str):
            yield own
    if isinstance(node, Mapping | list | tuple):
        for below in node.values() if isinstance(node, Mapping) else node:
            yield from _named(below)


def fingerprint(names: Sequence[str]) -> str | None:
    """Return a hash of the source of the classes `names`; None where all are of installed packages.

    That is their modules, and what these import of the person's own, however deep.
    """
    found = own_modules(names)
    if not found:
        return None
    total = hashlib.sha256()
    for part in sorted(found):
        if part.startswith(PREFIX):  # whose name is a digest, which its pickle is not
            total.update(part.encode())
            continue
        total.update(f"{part}\0{hashlib.sha256(found[part].read_bytes()).hexdigest()}\0".encode())
    return total.hexdigest()[:12]


def import_anew(names: Sequence[str]) -> None:
    """Let the next import of the classes `names` read the source that `fingerprint` has read.

    What this process has imported before may be older. Objects made before keep their classes.
    """
    for module in own_modules(names):
        sys.modules.pop(module, None)
    importlib.invalidate_caches()


def install_finder() -> None:
    """Let this process import custom modules as their source is now.

    Python takes a cached .pyc for that of any file of the same size and, in whole seconds, the same
    time, and `cp -p`, rsync and git bring such files. For custom modules a checksum of the source
    stands in place of the time.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder:
    """Has the other finders find a module, and changes how a custom one is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in [each for each in sys.meta_path if each is not self]:
            if spec := finder.find_spec(name, path, target):
                loader = spec.loader
                if type(loader) is SourceFileLoader and _is_own(os.path.dirname(loader.path)):
                    spec.loader = _ByContent(loader.name, loader.path)
                return spec
        return None


class _ByContent(SourceFileLoader):
    def path_stats(self, path: str) -> Mapping[str, Any]:
        source = self.get_data(path)
        return {"mtime": zlib.crc32(source), "size": len(source)}


_FINDER = _Finder()


@functools.cache  # of hundreds of modules that torch imports late
def _is_own(folder: str) -> bool:
    return not is_installed(Path(folder))


def with_own_source(names: Sequence[str]) -> tuple[str, ...]:
    """Return those of the classes `names` whose source `fingerprint` reads, each once.

    All are returned where no source is found any more.
    """
    return tuple(dict.fromkeys(name for name in names if own_modules([name]))) or tuple(
        dict.fromkeys(names)
    )


def own_modules(names: Sequence[str]) -> dict[str, Path]:
    """Return the person's own modules that the classes `names` come from, and their files."""
    found: dict[str, Path] = {}
    todo = [name.rpartition(".")[0] for name in names]
    while todo:
        module = todo.pop()
        for part, path in _files_of(module):
            if part not in found:
                found[part] = path
                todo += _imports(path, part)
    return found


def _files_of(module: str) -> Iterator[tuple[str, Path]]:
    """Yield the files that importing `module` runs, unless they are of an installation."""
    search: Sequence[str] | None = None
    names = module.split(".")
    for end in range(1, len(names) + 1):
        spec = _spec(".".join(names[:end]), search)
        if spec is None or spec.origin is None:  # a folder without __init__.py, if anything
            search = [
                str(at)
                for folder in search or sys.path
                if (at := Path(folder) / names[end - 1]).is_dir()
            ]
            continue
        if not Path(spec.origin).is_file() or is_installed(Path(spec.origin)):
            return
        yield spec.name, Path(spec.origin)
        search = spec.submodule_search_locations or []


def _spec(name: str, search: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:  # importlib.util.find_spec would import the packages
        with contextlib.suppress(KeyError):  # a namespace whose parent is not imported
            if spec := finder.find_spec(name, search):
                return spec
    return None


def is_installed(path: Path) -> bool:
    """Return whether a file is of Python, expt or a package, and not the person's own."""
    of_packages = [
        folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")
    ]
    folders = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), *of_packages)
    return any(path.is_relative_to(folder) for folder in folders)


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return where in the person's own code an error was raised, or None."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    own = (
        frame
        for frame in frames
        if not (frame.filename.startswith("<") or is_installed(Path(frame.filename)))
    )
    return next(own, None)


def _imports(path: Path, module: str) -> Iterator[str]:
    """Yield the dotted names that a file may import; of `from a import b` both a and a.b."""
    try:
        tree = ast.parse(path.read_bytes())
    except (
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ):  # an extension module, or what the worker will complain of
        return
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
