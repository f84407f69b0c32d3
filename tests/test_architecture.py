"""The rules that keep the package readable: who imports whom, how long things are, where names of files live."""

from __future__ import annotations

import ast
import graphlib
import itertools
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import expt

# A module imports from lower layers only; `models` and `data` are packages, whose files may import one another.
LAYERS: dict[int, tuple[str, ...]] = {
    0: (
        "errors", "machine", "paths", "schema", "rules", "config", "record", "provenance", "forkserver", "target",
        "constraints", "model_schema", "schedule", "identity", "overrides", "signals", "device_locks", "watchdog",
        "redaction", "process", "malloc", "scheduler",
    ),
    1: (
        "models", "data", "optim", "eager", "precision", "metrics", "distributed", "tensorboard", "checkpoint",
        "failed_events", "profiling", "shared_memory", "fault", "hparams", "pictures", "review", "norms", "health",
        "onednn", "rendezvous",
    ),
    2: ("train", "agreement", "diagnosis"),
    3: ("entry", "worker", "build", "log", "snapshot", "resume", "divergence", "dashboard"),
    4: ("launch", "failure", "preload", "pool", "display", "sweep_display", "report", "comparison", "plot"),
    5: (
        "__main__", "session", "arguments", "explain", "usage", "grid", "multirun", "repeat", "rerun", "api",
        "single_run", "doctor", "external", "cluster",
    ),
}  # fmt: skip
# What a module may import beside that, from its own layer. Those of layer 0 may import one another.
ALSO: dict[str, set[str]] = {
    "optim": {"eager"},
    "entry": {"worker"},
    "worker": {"build", "divergence", "log", "snapshot"},
    "launch": {"failure"},
    "tensorboard": {"hparams", "pictures"},
    "failed_events": {"hparams"},
    "review": {"data"},
    "build": {"dashboard"},
    "dashboard": {"log"},
    "pool": {"launch"},
    "sweep_display": {"display", "pool"},
    "report": {"display", "comparison"},
    "comparison": {"display", "plot"},
    "plot": {"display"},
    "grid": {"explain"},
    "multirun": {"grid", "session"},
    "cluster": {"multirun", "single_run", "external"},
    "external": {"single_run"},
    "session": {"arguments", "explain", "single_run", "external"},
    "arguments": {"explain"},
    "repeat": {"single_run"},
    "rerun": {"api"},
    "api": {"repeat", "session"},
    "doctor": {"api"},
    "__main__": {"session", "explain", "usage", "doctor"},
}
# The highest layer that a module may import, where that is not the one below its own.
AT_MOST = dict.fromkeys(("display", "sweep_display", "report", "comparison", "plot", "explain", "usage"), 0)

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_MEDIAN_LINES = 300, 60, 15
GRAB_BAGS = {"utils", "util", "helpers", "helper", "common", "base", "misc", "manager"}
WITHOUT_DOCSTRINGS = {"schema", "model_schema"}  # conf/ says what each key means

PACKAGE = Path(expt.__file__).parent
LAYER = {name: layer for layer, names in LAYERS.items() for name in names}


class Module(NamedTuple):
    name: str  # dotted, below expt
    tree: ast.Module
    num_lines: int

    @property
    def component(self) -> str:
        return self.name.partition(".")[0]


def _read(path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    name = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
    return Module(name, ast.parse(text), len(text.splitlines()))


MODULES = {module.name: module for module in map(_read, sorted(PACKAGE.rglob("*.py")))}
each_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES.keys())


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of every import, late ones included; `from a import b` is a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(module: Module) -> set[str]:
    """The modules of expt, dotted below it, that `module` imports."""
    names = (name.removeprefix("expt.") for name in imported(module.tree) if name.startswith("expt."))
    return {found for name in names if (found := _module_of(name)) and found != module.name}


def _module_of(name: str) -> str | None:
    return next((known for known in (name, name.rpartition(".")[0]) if known in MODULES), None)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


@each_module
def test_imports_go_down(module: Module) -> None:
    own = module.component
    if own == "__init__":  # the public names
        assert {name.partition(".")[0] for name in own_imports(module)} <= {"api", "errors"}
        return
    assert own in LAYER, f"{own}: add it to LAYERS in tests/test_architecture.py"
    allowed = {name for name in LAYER if LAYER[name] <= AT_MOST.get(own, LAYER[own] - 1)} | ALSO.get(own, set()) | {own}
    if LAYER[own] == 0:
        allowed |= set(LAYERS[0])
    found = {name.partition(".")[0] for name in own_imports(module)}
    assert found <= allowed, f"{module.name} (layer {LAYER[own]}) may not import {', '.join(sorted(found - allowed))}"


@pytest.mark.parametrize("name", [name for name in LAYERS[0] if name in MODULES])
def test_the_lowest_layer_is_free_of_torch(name: str) -> None:
    assert not {found for found in imported(MODULES[name].tree) if re.match(r"torch(vision)?\b", found)}


def test_no_import_goes_round() -> None:
    graph = {name: own_imports(module) for name, module in MODULES.items() if name != "__init__"}
    for name, module in MODULES.items():
        # Two files whose types name each other are no cycle at run time.
        for node in ast.walk(module.tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and name in graph:
                graph[name] -= own_imports(Module(name, ast.Module(node.body, []), 0))
    assert list(graphlib.TopologicalSorter(graph).static_order())


@each_module
def test_names_of_a_runs_files_stand_in_paths(module: Module) -> None:
    names = {name for name in _strings(MODULES["paths"].tree) if re.fullmatch(r"\.?\w+\.\w+", name)}
    assert {"result.json", "metrics.jsonl", "last.pt", "best.pt", "stderr.log", "error.json"} <= names
    if module.name != "paths":
        assert not {text for text in _strings(module.tree) if any(name in text for name in names)}


def _strings(tree: ast.Module) -> Iterator[str]:
    """Every string that is not a docstring."""
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node.value


@each_module
def test_a_name_says_what_is_inside(module: Module) -> None:
    assert not GRAB_BAGS & set(module.name.lower().split("."))


@each_module
def test_files_and_functions_fit_a_mind(module: Module) -> None:
    assert module.num_lines <= MAX_FILE_LINES
    too_long = {node.name: length(node) for node in functions(module.tree) if length(node) > MAX_FUNCTION_LINES}
    assert not too_long


def test_most_functions_are_short() -> None:
    lengths = itertools.chain.from_iterable(map(length, functions(module.tree)) for module in MODULES.values())
    assert statistics.median(lengths) <= MAX_MEDIAN_LINES


@each_module
def test_every_public_name_is_explained(module: Module) -> None:
    if module.name not in WITHOUT_DOCSTRINGS:
        assert list(_unexplained(module.tree, module.name)) == []


def _unexplained(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[str]:
    if not ast.get_docstring(node):
        yield name
    if isinstance(node, ast.Module | ast.ClassDef):
        for below in node.body:
            if isinstance(below, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and below.name[0] != "_":
                yield from _unexplained(below, f"{name}.{below.name}")
