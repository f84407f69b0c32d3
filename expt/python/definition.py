"""The text of a class or a function of `__main__`, by the lines that its code says it comes from."""

from __future__ import annotations

import ast
import dis
import linecache
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from expt.python.same_code import functions_in

_FUTURE_ANNOTATIONS = 0x1000000
"""Of a code object's flags: `from __future__ import annotations` stood above it."""
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


class Unknown(Exception):
    """Where a class or a function comes from cannot be known."""


class Definition(NamedTuple):
    """One class or function."""

    text: str
    node: ast.stmt
    around: ast.Module
    """The cell or script that it stands in."""
    names: frozenset[str]
    """Those that it uses of the module around it."""
    annotations_are_texts: bool
    codes: tuple[types.CodeType, ...]
    """The functions in it, as Python makes them of its text: of the whole script, and of this
    definition alone.
    """


def definition_of(named: type | types.FunctionType) -> Definition:
    """That of a class or function of `__main__`. Raises Unknown."""
    codes = [function.__code__ for function in functions_in(named)]
    for code in codes:
        for tree, lines in parsed(code.co_filename):
            for node in _defined(tree, named.__name__):
                if _first_line(node) <= code.co_firstlineno <= (node.end_lineno or 0):
                    return _definition(node, tree, lines, bool(code.co_flags & _FUTURE_ANNOTATIONS))
    for filename in _files_of_main():  # a class without functions, or with another's: by its name
        for tree, lines in parsed(filename):
            for node in _defined(tree, named.__name__):
                return _definition(node, tree, lines, has_texts=_in_future(tree))
    raise Unknown("its text is not known here, and no worker has this __main__")


def parsed(filename: str) -> Iterator[tuple[ast.Module, list[str]]]:
    """The syntax of a file or a cell, and its lines; none where there is no such text."""
    lines = linecache.getlines(filename)
    try:
        yield ast.parse("".join(lines)), lines
    except (SyntaxError, ValueError):
        return


def _files_of_main() -> list[str]:
    """The script, or the cells of a notebook, the newest first."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    cells = [name for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None]
    return [script] if script else cells[::-1]


def _in_future(tree: ast.Module) -> bool:
    imports = (
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    )
    return any(alias.name == "annotations" for node in imports for alias in node.names)


def _defined(tree: ast.Module, name: str) -> Iterator[ast.stmt]:
    """The definitions of `name` that are in no other, the last first."""
    found, todo = list[ast.stmt](), list[Any](tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found += [node] if node.name == name else []
        else:
            todo += [
                below
                for below in ast.iter_child_nodes(node)
                if isinstance(below, ast.stmt | ast.ExceptHandler)
            ]
    yield from sorted(found, key=lambda node: -node.lineno)


def _first_line(node: Any) -> int:
    return int(min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]))


def _definition(node: ast.stmt, tree: ast.Module, lines: list[str], has_texts: bool) -> Definition:
    first, column = _first_line(node), node.col_offset
    text = "".join(
        line[column:] if not line[:column].strip() else line
        for line in lines[first - 1 : node.end_lineno]
    )
    future = "from __future__ import annotations\n" if has_texts else ""
    try:
        code = compile(future + text, "<definition>", "exec", dont_inherit=True)
    except SyntaxError as error:
        raise Unknown(f"its text cannot be read by itself ({error.msg})") from error
    alone = compile(
        ast.Module([node], []),
        "<cell>",
        "exec",
        _FUTURE_ANNOTATIONS if has_texts else 0,
        dont_inherit=True,
    )
    whole = compile("".join(lines), "<script>", "exec", dont_inherit=True)
    found = (*_codes_in(alone), *_codes_in(whole))
    codes = tuple(code for code in found if first <= code.co_firstlineno <= (node.end_lineno or 0))
    return Definition(text.rstrip("\n"), node, tree, frozenset(_names_of(code)), has_texts, codes)


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    for below in code.co_consts:
        if isinstance(below, types.CodeType):
            yield below
            yield from _codes_in(below)


def _names_of(code: types.CodeType) -> Iterator[str]:
    """The names that are looked up in the module, at any depth."""
    steps = list(dis.get_instructions(code))
    if any(step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for step in steps):
        raise Unknown("it changes a global variable, which is another in each worker")
    own = {step.argval for step in steps if step.opname == "STORE_NAME"}
    yield from (step.argval for step in steps if step.opname in _LOADS and step.argval not in own)
    for below in code.co_consts:
        if isinstance(below, types.CodeType):
            yield from _names_of(below)
