"""What a class or a function of `__main__` uses from around it, as the lines that make it again in
another module.
"""

from __future__ import annotations

import ast
import importlib
import linecache
import math
import sys
import types
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from expt.python.definition import Definition, parsed

MAX_TEXT = 10_000
"""Characters of a constant: more are data."""


class NotKept(Exception):
    """What a class uses cannot be written down."""

    def __init__(self, text: str, mend: str = "") -> None:
        super().__init__(text)
        self.mend = mend


def line_for(definition: Definition, name: str, value: Any) -> str:
    """The line by which a module has `value` as `name`. Raises NotKept."""
    if isinstance(value, types.ModuleType):
        return "\n".join(_imports_of(definition, name, value))
    if _is_constant(value) and len(text := repr(value)) <= MAX_TEXT:
        return f"{name} = {text}"
    if line := _imported(definition, name, value):
        return line
    if isinstance(value, PurePath):
        return f"from pathlib import Path as {name}_; {name} = {name}_({str(value)!r})"
    raise NotKept(
        f"it uses {name} of the notebook or script, {_kind(value)}, which no other process has",
        "let the class make it, or take it as an argument",
    )


def _kind(value: Any) -> str:
    cls = type(value)
    return (
        f"of type {cls.__name__}"
        if cls.__module__ == "builtins"
        else f"of type {cls.__module__}.{cls.__name__}"
    )


def _imports_of(definition: Definition, name: str, module: types.ModuleType) -> Iterator[str]:
    """The module as it is called, and those below it that are used by their dotted names."""
    if module.__name__ == "__main__":
        raise NotKept("it uses __main__ itself")
    whole = module.__name__
    yield f"import {whole}" if name == whole else f"import {whole} as {name}"
    for node in ast.walk(definition.node):
        if isinstance(node, ast.Attribute) and (below := ast.unparse(node)).startswith(f"{name}."):
            part = whole + below.removeprefix(name)
            if part in sys.modules and part.replace(".", "").isidentifier():
                yield f"import {part}" if name == whole else f"import {part} as _"


def _imported(definition: Definition, name: str, value: Any) -> str | None:
    """By where a class or function says it is, else by the import statement of the script or of a
    cell.
    """
    module, called = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if isinstance(module, str) and isinstance(called, str) and _has(module, called, value):
        return _from(module, called, name)
    for statements in (_import_statements(definition.around), *_of_other_cells()):
        for module, called in statements.get(name, ()):
            if _has(module, called, value):
                return _from(module, called, name)
    return None


def _import_statements(tree: ast.Module) -> dict[str, list[tuple[str, str]]]:
    """From the names that `from a import b as name` makes to a and b."""
    found: dict[str, list[tuple[str, str]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, []).append((node.module, alias.name))
    return found


def _of_other_cells() -> Iterator[dict[str, list[tuple[str, str]]]]:
    for filename, entry in list(linecache.cache.items()):
        # Not of a file, and not made by a program.
        if (
            len(entry) > 1
            and entry[1] is None
            and any("import" in line for line in linecache.getlines(filename))
        ):
            yield from (_import_statements(tree) for tree, _ in parsed(filename))


def _from(module: str, called: str, name: str) -> str:
    return f"from {module} import {called}" + ("" if called == name else f" as {name}")


def _other_cells() -> Iterator[ast.Module]:
    for filename, entry in list(linecache.cache.items()):
        if len(entry) > 1 and entry[1] is None:  # not of a file
            yield from (tree for tree, _ in parsed(filename))


def _has(module: str, name: str, value: Any) -> bool:
    if module == "__main__" or module not in sys.modules:
        return False
    return getattr(importlib.import_module(module), name, None) is value


def _is_constant(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if type(value) in (list, tuple, set, frozenset):
        return (
            type(value) is not frozenset
            and bool(value or type(value) is not set)
            and all(map(_is_constant, value))
        )
    if type(value) is dict:
        return all(map(_is_constant, value)) and all(map(_is_constant, value.values()))
    return type(value) in (bool, int, str, bytes, type(None), complex)
