"""Which code a person's own classes are: their source, and that of what they import.

Nothing is run. Free of torch.

What they reach otherwise is not seen: importlib.import_module, a file that they read.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.machinery
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from expt.config.schema import RunConfig
from expt.config.tasks import in_evaluations_alone


def targets(config: RunConfig) -> tuple[str, ...]:
    """The dotted names of the person's own classes in a configuration, and of those among their
    arguments.
    """
    chosen = (
        config.model,
        config.task,
        config.dataset,
        config.optimizer,
        config.scheduler,
        *config.callbacks,
    )
    metrics = in_evaluations_alone(config.task).values()
    own = (vars(node) for node in (*chosen, *metrics) if getattr(node, "name", None) == "_target_")
    transforms = _nested(getattr(config.dataset, "transforms", None))
    return (*(name for node in own for name in _names(node)), *transforms)


def targets_recorded(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """What `targets` gave for the configuration of which a record has the `settings`."""
    nodes = [
        settings.get(group) for group in ("model", "task", "dataset", "optimizer", "scheduler")
    ]
    nodes += [
        *(settings.get("callbacks") or []),
        *((settings.get("task") or {}).get("metrics") or {}).values(),
    ]
    own = (
        name
        for node in nodes
        if isinstance(node, dict) and "target" in node
        for name in _names(node)
    )
    return (*own, *_nested((settings.get("dataset") or {}).get("transforms")))


def _names(node: Mapping[str, Any]) -> Iterator[str]:
    yield str(node["target"])
    yield from _nested([node.get(key) for key in ("kwargs", "train", "test")])


def _nested(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(target := value.get("_target_"), str):
            yield target
        value = list(value.values())
    if isinstance(value, list | tuple):
        for below in value:
            yield from _nested(below)


def fingerprint(names: Sequence[str]) -> str | None:
    """12 hexadecimal digits of the source that the classes `names` come from; None where all are of
    installed packages.

    That is their modules, and what these import of the person's own, however deep; comments count
    too."""
    found = own_modules(names)
    if not found:
        return None
    total = hashlib.sha256()
    for part in sorted(found):
        total.update(f"{part}\0{hashlib.sha256(found[part].read_bytes()).hexdigest()}\0".encode())
    return total.hexdigest()[:12]


def import_anew(names: Sequence[str]) -> None:
    """Let the next import of the classes `names` read the source that `fingerprint` has read.

    What this process has imported before may be older. Objects made before keep the classes that
    they have."""
    for module in own_modules(names):
        sys.modules.pop(module, None)
    importlib.invalidate_caches()


def with_own_source(names: Sequence[str]) -> tuple[str, ...]:
    """Those of the classes `names` whose source `fingerprint` reads, each once; all where none is
    found any more.
    """
    return tuple(dict.fromkeys(name for name in names if own_modules([name]))) or tuple(
        dict.fromkeys(names)
    )


def own_modules(names: Sequence[str]) -> dict[str, Path]:
    """The person's own modules that the classes `names` come from, by name, and their files."""
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
    """The files that importing `module` runs, its packages' first: those that are no part of an
    installation.
    """
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
    """Whether a file is no part of the person's own code: Python's, expt's, or a package's."""
    of_packages = [
        folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")
    ]
    folders = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), *of_packages)
    return any(path.is_relative_to(folder) for folder in folders)


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Where in the person's own code it was raised, or what raised it was called; None where not
    from there.
    """
    frames = reversed(traceback.extract_tb(error.__traceback__))
    own = (
        frame
        for frame in frames
        if not (frame.filename.startswith("<") or is_installed(Path(frame.filename)))
    )
    return next(own, None)


def _imports(path: Path, module: str) -> Iterator[str]:
    """The dotted names that a file may import; of `from a import b` both a and a.b."""
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
