"""The code of custom classes: which files it is in, a hash of them, how it is imported and kept.

A class's code is its module, and what that imports of the person's own. What is reached otherwise,
as by importlib.import_module, is seen only by the run, which records what it has imported. Free of
torch.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import fcntl
import functools
import hashlib
import hmac
import importlib
import importlib.machinery
import inspect
import os
import re
import reprlib
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from expt.config import secrets
from expt.config.constraints import DOTTED_NAME, plain
from expt.config.imported import PREFIX, as_imported, edited, hash_now, install_finder, is_installed
from expt.errors import MISTAKES, ConfigError, did_you_mean

if TYPE_CHECKING:
    from expt.config.schema import RunConfig

T = TypeVar("T")
TRUST = "EXPT_TRUST_CODE"
_SIGNATURE = ".signature"


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


def changed(record: Mapping[str, Any]) -> list[str]:
    """Return the modules that a run has imported whose files hold something else now, or nothing.

    A file that is not where it was is looked for by its module's name: the project may have moved.
    """
    found = []
    for name, then in record.get("imported", {}).items():
        file = then["file"]
        if not os.path.isfile(file):
            file = next((str(path) for part, path in _files_of(name) if part == name), file)
        if hash_now(file) != then["hash"]:
            found.append(name)
    return found


def has_other_source(
    record: Mapping[str, Any], today: Callable[[tuple[str, ...]], str | None] = fingerprint
) -> bool:
    """Return whether a run's classes have other source now; not where they are not found."""
    then = (record.get("content") or {}).get("code")
    now = today(targets(record.get("config") or {})) if then else None
    return now is not None and (now != then or bool(changed(record)))


def is_imported(record: Mapping[str, Any]) -> bool:
    """Return whether this process has imported what a run has, and from the same source."""
    ran, here = record.get("imported", {}), as_imported()
    return bool(ran) and all(here.get(name, {}).get("hash") == ran[name]["hash"] for name in ran)


def older_here(names: Sequence[str], record: Mapping[str, Any] | None = None) -> list[str]:
    """Return the files of which this process has imported an older source.

    They are of the classes `names`, or were imported by the run of `record`.
    """
    if not (old := edited()) or is_imported(record or {}):
        return []
    concerned = {*own_modules(names), *(record or {}).get("imported", ())}
    return [os.path.relpath(file) for name, file in old.items() if name in concerned]


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


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return where in the person's own code an error was raised, or None."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not (frame.filename.startswith("<") or is_installed(frame.filename)):
            return frame
    return None


def _imports(path: Path, module: str) -> Iterator[str]:
    """Yield the dotted names that a file may import; of `from a import b` both a and a.b."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # an extension module, or what the worker will complain of
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
    for name, file in own_modules([*filter(is_of_main, targets(config))]).items():
        if is_of_main(name) and file.parent != folder:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / file.name)
            sign(folder)


def find_kept(folder: Path, *, trust: bool = False) -> None:
    """Let this process, and those it starts, import what `keep` has copied into `folder`.

    Raises ConfigError for what this user has not written there, unless it is trusted.
    """
    if os.path.isdir(folder) and (path := str(folder.absolute())) not in sys.path:
        if not (trust or os.environ.get(TRUST) == "1" or is_signed(folder)):
            raise ConfigError(
                f"{folder}: holds code that you have not written on this machine, and to load the"
                f" run is to run it; read it, then give trust_code=True, or {TRUST}=1 to a command"
            )
        sys.path.append(path)
        importlib.invalidate_caches()


def sign(folder: Path) -> None:
    """Sign the files in `folder` by a key that only this user has, unless there can be none."""
    if key := _key():
        (folder / _SIGNATURE).write_text(_signature(folder, key))


def is_signed(folder: Path) -> bool:
    """Return whether this user has signed these files; who can have no key must own them."""
    if (key := _key()) is None:
        return all(os.stat(at).st_uid == os.geteuid() for at in (folder, *_signed_files(folder)))
    signature = _signature(folder, key).encode()
    try:
        return hmac.compare_digest((folder / _SIGNATURE).read_bytes(), signature)
    except OSError:
        return False


def _signed_files(folder: Path) -> list[Path]:
    """Return all files but Python's caches."""
    found = (at for at in folder.rglob("*") if at.is_file() and at.name != _SIGNATURE)
    return sorted(at for at in found if "__pycache__" not in at.parts)


def _signature(folder: Path, key: bytes) -> str:
    total = hmac.new(key, digestmod="sha256")
    for file in _signed_files(folder):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{file.relative_to(folder)}\0{content}\0".encode())
    return total.hexdigest()


def _key() -> bytes | None:
    """Return the key of this user, made when it is first needed; None where it can't be kept."""
    try:
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        path = Path(base) / "expt" / "key"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_CREAT | os.O_RDWR, 0o600), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not (key := file.read()):
                file.write(key := os.urandom(32))
        return key
    except (OSError, RuntimeError):
        return None


def resolve(path: str, base: type[T]) -> type[T]:
    """Return the class that the dotted `path` names.

    Raises ConfigError unless it is a subclass of `base`.
    """
    module_name, _, name = path.rpartition(".")
    install_finder()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # SystemExit: of a script
        raise ConfigError(f"_target_={path}: {_of_import(module_name, error)}") from error
    found = getattr(module, name, None)
    if found is None:
        near = did_you_mean(name, dir(module))
        raise ConfigError(f"_target_={path}: {module_name} has no {name}.{near}")
    if not (isinstance(found, type) and issubclass(found, base)):
        kind = "class" if base is object else f"subclass of {base.__module__}.{base.__qualname__}"
        raise ConfigError(f"_target_={path}: refused, it is not a {kind}")
    return found


def _of_import(module: str, error: BaseException) -> str:
    if is_of_main(module):
        return (
            f"a class of a notebook's or script's __main__ is not here ({error}); define it there"
        )
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}" if error.filename else module
        return f"{where}: {error.msg}"
    if (frame := own_frame(error)) is None:
        folder = "its folder must be the current one or on PYTHONPATH (in Python: in sys.path)"
        return f"cannot import {module} ({error}); {folder}"
    where = f"{frame.filename}, line {frame.lineno}"
    return f"importing {module} raised {secrets.said(error)} ({where})"


def build(path: str, base: type[T], /, *args: Any, **kwargs: Any) -> T:
    """Return an instance of the class that `path` names; see `construct`. Raises ConfigError."""
    cls = resolve(path, base)
    return construct(f"{_GROUPS.get(base.__name__, '')}_target_={path}", cls, args, kwargs)


_GROUPS = {
    "Module": "model.",
    "Task": "task.",
    "Optimizer": "optimizer.",
    "LRScheduler": "scheduler.",
}


def construct(whose: str, cls: type[T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
    """Return an instance of the class; what its arguments name by `_target_` is built before it.

    Raises ConfigError, which begins with `whose`, for a mistake that another try would repeat.
    """
    return _called(whose, cls, args, nested_built(kwargs), kwargs)


def _called(
    whose: str,
    cls: type[T],
    args: Sequence[Any],
    arguments: Mapping[str, Any],
    typed: Mapping[str, Any],
) -> T:
    try:
        return cls(*args, **arguments)
    except Exception as error:
        if not _is_mistake(error):
            raise
        shown = {key: reprlib.repr(secrets.hidden(value)) for key, value in typed.items()}
        given = ", ".join(f"{key}={value}" for key, value in shown.items())
        frame = own_frame(error)
        where = f" ({frame.filename}, line {frame.lineno})" if frame else ""
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            near = did_you_mean(unknown[1], [x for x in _parameters(cls) if x not in arguments])
            where = f".{near}" if near else ""
        raise ConfigError(
            f"{whose}: cannot be built as {cls.__name__}({given}): {secrets.said(error)}{where}"
        ) from error


def _is_mistake(error: Exception) -> bool:
    """Return whether it is a mistake: torch has RuntimeErrors of memory and GPUs too."""
    if type(error) is RuntimeError:
        return not re.search(r"CUDA|allocate|connect", str(error))
    is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    return is_missing or type(error).__name__ in MISTAKES


def taken(cls: type, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the `offered` keyword arguments that the constructor of `cls` takes."""
    known = _parameters(cls)
    return {name: x for name, x in offered.items() if _takes_any(known) or name in known}


def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    found = inspect.signature(cls).parameters
    if _takes_any(found) and "__init__" in vars(cls):  # its __new__ may take anything
        return inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    return found


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def nested_built(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `arguments` with an instance for each `{_target_: a.B, ...}`, however deep.

    All are found before anything is called. Raises ConfigError for what is not a class, or one of
    Python's library.
    """
    for path in _named(arguments):
        _nested_class(path)
    return {key: _made(value) for key, value in arguments.items()}


def _made(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_made, value))
    if not isinstance(value, Mapping):
        return value
    cls = _nested_class(value["_target_"]) if "_target_" in value else None
    typed = {key: below for key, below in value.items() if key != "_target_"}
    arguments = {key: _made(below) for key, below in typed.items()}
    if cls is None:
        return arguments
    return _called(f"_target_={value['_target_']}", cls, (), arguments, typed)


def _nested_class(path: Any) -> type:
    """Return a class for which no base is known: of Python's library some run commands."""
    if not (isinstance(path, str) and re.fullmatch(DOTTED_NAME, path)):
        example = "_target_: torchvision.transforms.v2.RandAugment"
        raise ConfigError(f"_target_={path}: name a class, e.g. {example}")
    is_python_s = path.partition(".")[0] in sys.stdlib_module_names  # not imported, then
    cls: Any = None if is_python_s else resolve(path, object)
    if is_python_s or cls.__module__.partition(".")[0] in sys.stdlib_module_names:
        fix = "name a class of a package, or your own"
        raise ConfigError(f"_target_={path}: refused, it is of Python's own library; {fix}")
    return cast(type, cls)
