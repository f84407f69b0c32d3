"""What may be changed: every change that mutmut would make to a module, but for words that only a
person reads.
"""

from __future__ import annotations

import difflib
import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import libcst as cst
import yaml
from mutmut.mutation.mutators import OPERATORS_TYPE, mutation_operators

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("training", "worker", "launch", "runs", "config", "data")
EQUIVALENT = Path(__file__).with_name("equivalent.yaml")
# Messages, types, and what would end at import.
SPOKEN = (
    cst.Raise,
    cst.Assert,
    cst.BaseString,
    cst.Annotation,
    cst.Decorator,
    cst.Import,
    cst.ImportFrom,
)
SPEAKING = {"print", "warn", "note", "complain", "TypeVar", "cast", "isinstance"}


@dataclass(frozen=True)
class Change:
    """A module's path below the repository, and its text with one change."""

    path: str
    before: str
    after: str

    @property
    def lines(self) -> tuple[str, str]:
        """The lines that went, and those that came."""
        removed = [line for line in self._compared() if line.startswith("-")]
        added = [line for line in self._compared() if line.startswith("+")]
        return tuple("\n".join(line[1:].strip() for line in part) for part in (removed, added))  # type: ignore[return-value]

    @property
    def where(self) -> str:
        """File and line, as editors take them."""
        old, new = self.before.splitlines(), self.after.splitlines()
        same = (
            number
            for number, (one, other) in enumerate(zip(old, new, strict=False), 1)
            if one != other
        )
        return f"{self.path}:{next(same, len(old))}"

    @property
    def key(self) -> str:
        """The same for the same change of the same text."""
        return hashlib.sha256(f"{self.path}\0{self.after}".encode()).hexdigest()[:16]

    def diff(self) -> str:
        """The lines that differ, for a person."""
        return "\n".join(f"  {line[0]} {line[1:].strip()}" for line in self._compared())

    def _compared(self) -> Iterator[str]:
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), lineterm="", n=0
        )
        return (line for line in lines if not line.startswith(("---", "+++", "@@")))


def _left_out(statement: cst.Expr) -> Iterable[cst.CSTNode]:
    """A call for its effect alone, left out."""
    if isinstance(statement.value, cst.Call):
        yield cst.Pass()


OPERATORS: OPERATORS_TYPE = (*mutation_operators, (cst.Expr, _left_out))


class Place(NamedTuple):
    """A node of a module, and what it may be changed to."""

    path: Path
    module: cst.Module
    node: cst.CSTNode
    changed: cst.CSTNode

    def change(self) -> Change:
        """The module's text with that change: slow, so only for those that were drawn."""
        after = cst.ensure_type(self.module.deep_replace(self.node, self.changed), cst.Module).code
        return Change(str(self.path.relative_to(ROOT)), self.module.code, after)


def places(path: Path) -> Iterator[Place]:
    """Wherever a module can be changed."""
    module = cst.parse_module(path.read_text())
    for node in _changeable(module):
        for kind, operator in OPERATORS:
            for changed in operator(node) if isinstance(node, kind) else ():
                if not changed.deep_equals(node):
                    yield Place(path, module, node, changed)


def _changeable(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if isinstance(node, SPOKEN) or (isinstance(node, cst.Call) and _name(node.func) in SPEAKING):
        return
    yield node
    for child in node.children:
        yield from _changeable(child)


def _name(called: cst.BaseExpression) -> str:
    name = called.attr if isinstance(called, cst.Attribute) else called
    return name.value.lstrip("_") if isinstance(name, cst.Name) else ""


def sample(seed: int, count: int, modules: Sequence[Path]) -> list[Change]:
    """`count` of all changes to `modules`, the same for the same seed and source."""
    found = [place for path in sorted(modules) for place in places(path)]
    return [place.change() for place in random.Random(seed).sample(found, min(count, len(found)))]


def modules(pattern: str) -> list[Path]:
    """The modules of the packages whose path below expt/ matches."""
    found = (path for package in PACKAGES for path in (ROOT / "expt" / package).rglob("*.py"))
    return [
        path
        for path in found
        if path.name != "__init__.py" and path.relative_to(ROOT / "expt").match(pattern)
    ]


def equivalent() -> dict[tuple[str, str, str], str]:
    """Changes that change nothing a test could notice: path, line before and after, and why."""
    listed = yaml.safe_load(EQUIVALENT.read_text()) or []
    return {(each["path"], each["before"], each["after"]): each["why"] for each in listed}
