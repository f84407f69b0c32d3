"""A person's own modules: which they are, their source by names and as imported, its changes since.

A class's code is its module, and the person's own modules that it imports. Modules that are reached
otherwise, as by importlib.import_module, are seen only by the run, which records its imports. Free
of torch.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import pkgutil
import py_compile
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import NotRequired, TypedDict

from expt.config.constraints import plain

if TYPE_CHECKING:
    from expt.config.schema import RunConfig


class Imported(TypedDict):
    """The source of a module of a person's own, or the list of a package's modules."""

    file: str
    """The file, or the package's folder; relative if it was below the current folder."""
    hash: str
    by_path: NotRequired[Literal[True]]
    """Set where the name alone leads to no or another file, as with spec_from_file_location."""


PREFIX = "expt_main_"
"""The start of the names of modules of `__main__`'s classes; see expt.config.kept_code."""
_PACKAGE = ".*"
"""The end of a name that stands for the list of a package's modules."""
_seen: dict[int, tuple[object, str]] = {}
"""The spec of each import by its id, and the hash of the file when it was first looked at."""
_lock = threading.RLock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def is_installed(path: Path | str) -> bool:
    """Return whether a file is of Python, expt or a package, and not the person's own."""
    return f"{path}/".startswith(_installed(tuple(map(str, sys.path))))


@functools.lru_cache(1)
def _installed(path: tuple[str, ...]) -> tuple[str, ...]:
    expt = Path(__file__).parents[1]
    own = (os.path.dirname(os.__file__), str(expt), str(expt.with_name("hydra_plugins")))
    ends = ("site-packages", "dist-packages")
    of_packages = (each for each in path if each.endswith(ends) or _is_target(each))
    return tuple(f"{folder}/" for folder in (*own, *of_packages))


def _is_target(folder: str) -> bool:
    """Return whether pip has installed packages into a folder, as by `pip install --target`."""
    is_here = os.path.realpath(folder or ".") == os.getcwd()  # which may be a package's own
    return not is_here and next(Path(folder).glob("*.dist-info"), None) is not None


def is_of_main(target: str) -> bool:
    """Return whether a dotted name is of a module that was made of `__main__`."""
    return target.startswith(PREFIX)


def own_files() -> dict[str, str]:
    """Return the person's own modules that are imported, by name, and the absolute file of each.

    Left out are `__main__`, modules made of its classes, and those that are not in `sys.modules`.
    """
    found, installed = dict[str, str](), _installed(tuple(map(str, sys.path)))
    for name, module in sys.modules.copy().items():  # a thread may import meanwhile
        spec = getattr(module, "__spec__", None) if isinstance(module, ModuleType) else None
        if not isinstance(spec, ModuleSpec) or not spec.has_location:
            continue
        file = getattr(spec.loader, "archive", None) or str(spec.origin)  # that of a zip
        is_made = name.startswith((PREFIX, "__"))
        if not is_made and not file.startswith(installed) and os.path.isfile(file):
            found[name] = os.path.abspath(file)
    return found


def place_of(error: BaseException) -> str:
    """Return ` (FILE, line 1)`, where in the person's own code an error was raised, or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not (frame.filename.startswith("<") or is_installed(frame.filename)):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def targets(settings: RunConfig | Mapping[str, Any]) -> tuple[str, ...]:
    """Return the dotted names of custom classes, those among the arguments of others too."""
    return tuple(named_in(plain(settings)))


def named_in(node: Any) -> Iterator[str]:
    """Yield the values of `_target_` in nested settings."""
    for _, each in _mappings(node):
        own = each.get("target") if each.get("name") == "_target_" else each.get("_target_")
        if isinstance(own, str):
            yield own


_FROZEN = ("expt.Frozen", "expt.inference.frozen.Frozen")  # as YAML and Python name it


def frozen_in(node: Any) -> Iterator[tuple[str, str]]:
    """Yield the key of each frozen network's weights in nested settings, and their name."""
    for key, each in _mappings(node):
        if each.get("_target_") in _FROZEN and "weights" in each:
            yield f"{key}.weights", str(each["weights"])


def _mappings(node: Any, key: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the key of each mapping in nested settings, and the mapping."""
    if isinstance(node, Mapping):
        yield key, node
    if isinstance(node, Mapping | list | tuple):
        for name, below in node.items() if isinstance(node, Mapping) else enumerate(node):
            # Arguments are typed next to their `_target_`.
            typed = f"{key}.{name}".lstrip(".").replace(".kwargs.", ".").removesuffix(".kwargs")
            yield from _mappings(below, typed)


def own_modules(names: Sequence[str]) -> dict[str, Path]:
    """Return the person's own modules that the classes `names` come from, and their files."""
    found: dict[str, Path] = {}
    todo = [name.rpartition(".")[0] for name in names]
    while todo:
        for part, path in _files_of(todo.pop()):
            if part not in found:
                found[part] = path
                todo += _imports(path, part)
    return found


def _files_of(module: str, path: Sequence[str] | None = None) -> Iterator[tuple[str, Path]]:
    """Yield the files that importing `module` runs, unless they are of an installation.

    They are looked for in the folders of `path`, or those of `sys.path`.
    """
    search, names = path, module.split(".")
    for end in range(1, len(names) + 1):
        spec = _spec(".".join(names[:end]), search)
        if spec is None or spec.origin is None:  # a folder without __init__.py, if anything
            below = (Path(folder) / names[end - 1] for folder in search or sys.path)
            search = [str(folder) for folder in below if folder.is_dir()]
            continue
        if not Path(spec.origin).is_file() or is_installed(Path(spec.origin)):
            return
        yield spec.name, Path(spec.origin)
        search = spec.submodule_search_locations or []


def _spec(name: str, search: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:  # importlib.util.find_spec would import the packages
        with contextlib.suppress(KeyError):  # a namespace whose parent is not imported
            if spec := finder.find_spec(name, search):
                return spec
    return None


def _imports(path: Path, module: str) -> Iterator[str]:
    """Yield the dotted names that a file may import; of `from a import b` both a and a.b."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # an extension module, or one that the worker will refuse
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError):  # beyond the top: the worker will say so
                name = "." * node.level + (node.module or "")
                base = importlib.util.resolve_name(name, package)
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def fingerprint(names: Sequence[str]) -> str | None:
    """Return a hash of the source of the classes `names`; None where all are of installed packages.

    That is their modules, and the person's own modules that these import, however deep.
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


def as_imported(
    named: Collection[str] = (), path: Sequence[str] | None = None
) -> dict[str, Imported]:
    """Return the person's own modules, by name, each with its file and the hash of its source.

    That is the source as this function has first found it; an empty hash if the module's functions
    are not that source's, which was edited before. A package that was searched for its modules, as
    by pkgutil.iter_modules, also has the hash of their list: all of them are imported, and import
    statements name only those in `named`. A file is relative where it is below the current folder.
    `path` is `sys.path` before these modules could change it.
    """
    here, found, files = os.getcwd() + os.sep, dict[str, Imported](), own_files()
    hashes = {name: (file, _hash_at_import(name, file)) for name, file in files.items()}
    for package in {name.rpartition(".")[0] for name in files.keys() - {*named}}:
        for folder in getattr(sys.modules.get(package), "__path__", ()):
            if {f"{package}.{each.name}" for each in pkgutil.iter_modules([folder])} <= {*files}:
                hashes[package + _PACKAGE] = folder, hash_now(folder) or ""
    for name, (file, content) in hashes.items():
        found[name] = {"file": file.removeprefix(here), "hash": content}
        if _by_name(name, path) != os.path.abspath(file):
            found[name]["by_path"] = True
    return found


def _hash_at_import(name: str, file: str) -> str:
    """Return the hash of a module's file when this was first asked; "" if it was edited before."""
    module, spec = sys.modules[name], sys.modules[name].__spec__
    if spec and id(spec) not in _seen:
        _seen[id(spec)] = spec, (_is_as_now(module, spec) and hash_now(file)) or ""
    return _seen[id(spec)][1]


def _is_as_now(module: ModuleType, spec: ModuleSpec) -> bool:
    """Return whether the functions of a module, and of its classes, are those of its file now."""
    if type(spec.loader) is not SourceFileLoader:  # others may rewrite their source
        return True
    try:
        now: Any = spec.loader.get_code(spec.name)
    except (ImportError, OSError, SyntaxError, ValueError):
        return False
    known, own = {*_codes(now)}, [vars(module).copy()]
    own += [{**vars(each)} for each in own[0].values()
            if isinstance(each, type) and each.__module__ == spec.name]  # fmt: skip
    functions = (getattr(each, "__func__", each) for part in own for each in part.values())
    codes = (each.__code__ for each in functions if isinstance(each, FunctionType))
    return all(each in known for each in codes if each.co_filename == now.co_filename)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def hash_now(path: str) -> str | None:
    """Return the hash of a file, or of the modules in a folder; None without either."""
    try:
        if os.path.isdir(path):
            names = sorted(module.name for module in pkgutil.iter_modules([path]))
            return _hash("\n".join(names).encode())
        return _hash(Path(path).read_bytes())
    except OSError:
        return None


def _hash(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:12]


def changed(record: Mapping[str, Any]) -> list[str]:
    """Return the modules that a run has imported whose files hold something else now, or nothing.

    Compared is the file that an import of the name would find now, or else the one imported then.
    """
    imported: Mapping[str, Imported] = record.get("imported", {})
    return [name for name, then in imported.items() if _hash_now(name, then) != then["hash"]]


def _hash_now(name: str, then: Imported) -> str | None:
    stays = then.get("by_path") and os.path.exists(then["file"])
    return hash_now((None if stays else _by_name(name)) or then["file"])


def _by_name(name: str, path: Sequence[str] | None = None) -> str | None:
    """Return the absolute path that an import would find for a name among those imported."""
    module = name.removesuffix(_PACKAGE)
    files = (os.path.abspath(file) for part, file in _files_of(module, path) if part == module)
    found = next(files, None)
    return found if module == name or found is None else os.path.dirname(found)


def has_other_source(
    record: Mapping[str, Any], today: Callable[[tuple[str, ...]], str | None] = fingerprint
) -> bool:
    """Return whether a run's classes have other source now; not where they are not found."""
    then = (record.get("content") or {}).get("code")
    now = today(targets(record.get("config") or {})) if then else None
    return now is not None and (now != then or bool(changed(record)))


def other_source(record: Mapping[str, Any]) -> str:
    """Return the line for a run whose custom classes have other source now, or an empty text."""
    if not has_other_source(record):
        return ""
    changes = "source code has changed since the run; the numbers may differ"
    return f"{changed_source(record)}: {changes}"


def changed_source(record: Mapping[str, Any]) -> str:
    """Return the names of the files that have changed, or else of the run's custom classes."""
    names = [os.path.relpath(record["imported"][name]["file"]) for name in changed(record)]
    if not names:
        names = [name for name in targets(record.get("config") or {}) if own_modules([name])]
    return ", ".join(dict.fromkeys(names))


def is_imported(record: Mapping[str, Any]) -> bool:
    """Return whether this process has imported the modules of a run, and from the same source."""
    ran, here = record.get("imported", {}), as_imported()
    return bool(ran) and all(
        name in here and here[name]["hash"] == ran[name]["hash"] for name in ran
    )


def older_here(names: Sequence[str], record: Mapping[str, Any] | None = None) -> list[str]:
    """Return the files that have changed since this process imported them.

    They are of the classes `names`, or were imported by the run of `record`.
    """
    here = as_imported()
    if not (edited := changed({"imported": here})) or is_imported(record or {}):
        return []
    concerned = {*own_modules(names), *(record or {}).get("imported", ())}
    return [os.path.relpath(here[name]["file"]) for name in edited if name in concerned]


@contextlib.contextmanager
def as_on_disk() -> Iterator[None]:
    """Import the person's own modules within the body as a new process does.

    Afterwards the modules of this process are those that it had; objects made keep their classes.
    """
    with _lock:
        before = {name: sys.modules.pop(name) for name in own_files()}
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


def check_caches(files: Iterable[str | Path]) -> None:
    """Have Python import these files as their source is.

    Python takes a .pyc for that of any source of the same size and, in whole seconds, the same
    time, and `cp -p`, rsync and git bring such files. A .pyc that has a checksum of its source
    (PEP 552) is compared by that.
    """
    for file in map(Path, files):
        with contextlib.suppress(OSError, py_compile.PyCompileError, NotImplementedError):
            if file.suffix != ".py" or _has_checksum(file):
                continue
            if sys.dont_write_bytecode:
                Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
            else:
                mode = py_compile.PycInvalidationMode.CHECKED_HASH
                py_compile.compile(str(file), doraise=True, invalidation_mode=mode)


def _has_checksum(file: Path) -> bool:
    try:
        with open(importlib.util.cache_from_source(str(file)), "rb") as cached:
            magic, flags = cached.read(4), int.from_bytes(cached.read(4), "little")
    except FileNotFoundError:
        return False
    return magic == importlib.util.MAGIC_NUMBER and flags == 0b11
