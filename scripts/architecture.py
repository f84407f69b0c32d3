"""Check the rules that keep the code readable: who imports whom, how long things are, which words.

`scripts/check` runs it. It prints a line for each problem, and exits 1 if there is one.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import inspect
import io
import itertools
import pydoc
import re
import statistics
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "expt"

# From top to bottom: a package imports from those below it, and from itself.
PACKAGES = (
    *("python", "command", "search", "launch", "worker", "planning", "inference", "dashboards"),
    *("training", "tasks", "data", "models", "runs", "config", "features"),
)
DOORS = ("__init__", "__main__", "api", "catalogue")  # above all packages
GROUND = ("errors", "gpus", "late", "machine", "progress", "registry", "signals")  # below them
LEVEL = {
    name: level
    for level, names in enumerate((GROUND, *((name,) for name in PACKAGES[::-1]), DOORS))
    for name in names
}
WITH_TORCH = ("checkpoint",)  # of `runs`
WITH_HYDRA = ("command.compose", "command.grammar", "command.hydra_part")

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_MEDIAN_LINES = 500, 60, 15
MAX_COLUMNS, MAX_COLUMNS_OF_PAGES = 100, 120
# If you need more, change the number and say why in the commit.
MAX_LINES_IN_ALL, MAX_FILES, MAX_TEST_LINES = 51_987, 246, 51_800
MAX_LINES = {
    "command": 6_736, "config": 3_777, "dashboards": 1_885, "data": 10_718, "features": 1_177,
    "inference": 2_372, "launch": 3_138, "models": 1_447, "planning": 270, "python": 722,
    "runs": 6_351, "search": 1_628, "tasks": 1_714, "training": 3_722, "worker": 4_894,
}  # fmt: skip
GRAB_BAGS = {"utils", "util", "helpers", "helper", "common", "base", "misc", "manager"}
WITHOUT_DOCSTRINGS = ("config.schema", "config.kinds", "config.groups")  # conf/ explains the keys
ODD_WORDS = re.compile(  # "what is missing" is better "missing files"
    r"\b(what|told|so many|of which|anew|alike|besides?|go(es)? on|comes? to|came to)\b", re.I
)
ODD_BEGINNING = re.compile(r"(For|Of|In|What|Whether|Whose|Where|To|By|As|With)\b")
DOCUMENTED = {
    "planning.plan": {"_subclasses", "_python_dispatch"},
    "worker.batch_checks": {"_python_dispatch"},
}  # of torch, by its own pages
STRATEGIES = ("Strategy", "DDP", "Phased", "Sharded", "Fitting")
UNPICKLES = ("data.formats", "launch.forkserver")  # CIFAR's own files; messages of processes
SETTINGS = ("sys.", "torch.backends.")  # of a process, and no part of another library
REPLACED = {
    "torch._dynamo",  # the first step 1 s sooner: see training/patches
    "torch.distributed.group.WORLD",
}


class Module(NamedTuple):
    """A file of expt."""

    name: str
    """Dotted, below expt."""
    tree: ast.Module
    text: str

    @property
    def component(self) -> str:
        """Its package, or the file itself if it lies above all packages."""
        return self.name.partition(".")[0]


def read(path: Path) -> Module:
    """Parse a file of expt."""
    text = path.read_text(encoding="utf-8")
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    name = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
    return Module(name, ast.parse(text), text)


@functools.cache
def modules() -> dict[str, Module]:
    """Return all of expt, by name."""
    return {module.name: module for module in map(read, sorted(PACKAGE.rglob("*.py")))}


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes below and including `tree`."""
    return tuple(ast.walk(tree))


@functools.cache
def imported(tree: ast.AST) -> tuple[str, ...]:
    """Return dotted names of every import, late ones included; `from a import b` is a.b."""
    found = list[str]()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found += (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def imported_by_name(tree: ast.AST) -> Iterator[str]:
    """Yield dotted names that importlib imports; of f"a.{b}" it is a."""
    for node in nodes(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0]
            name = name.values[0] if isinstance(name, ast.JoinedStr) else name
            if isinstance(name, ast.Constant):
                yield str(name.value).rstrip(".")


def own_imports(module: Module) -> set[str]:
    """Return the modules of expt, dotted below it, that `module` imports, by importlib too."""
    every = (*imported(module.tree), *imported_by_name(module.tree))
    names = (name.removeprefix("expt.") for name in every if name.startswith("expt."))
    known = ((name, name.rpartition(".")[0]) for name in names)
    found = (next((name for name in pair if name in modules()), None) for pair in known)
    return {name for name in found if name and name != module.name}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions and methods, inner ones included."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines, with the signature."""
    return (function.end_lineno or 0) - function.lineno + 1


def is_torch(name: str) -> bool:
    """Return whether the import of `name` brings torch."""
    return name.partition(".")[0] in ("torch", "torchvision", "tensorboard")


# ---- rules of each module: they yield what is wrong with it ----


def imports_go_down(module: Module) -> Iterator[str]:
    """Hold the order of packages: each imports from those below it."""
    own = module.component
    doors = {"api", "catalogue"} if own in DOORS else set()
    allowed = doors or ({"errors", "gpus"} if own in GROUND else {own})
    for name in sorted({name.partition(".")[0] for name in own_imports(module)} - allowed):
        if LEVEL[name] >= LEVEL[own]:
            yield f"imports {name}, which is not below it"
    for name in imported(module.tree):
        if name.startswith("."):
            yield f"imports {name} by a relative name"


def imports_of_others(module: Module) -> Iterator[str]:
    """Hold Hydra in two modules, and torch, whose import takes long, out of records and config."""
    light = (module.component in (*GROUND, "config") and module.name != "late") or (
        module.component == "runs" and module.name.rpartition(".")[2] not in WITH_TORCH
    )
    for name in imported(module.tree):
        library = name.partition(".")[0]
        if library == "hydra" and module.name not in WITH_HYDRA:
            yield f"imports {name}: only {', '.join(WITH_HYDRA)} do"
        yield from private_of_hydra(name)
        if is_torch(name) and (light or library == "torchvision"):
            yield f"imports {name}: it takes seconds in every command"


def private_of_hydra(name: str) -> Iterator[str]:
    """Refuse what Hydra keeps for itself."""
    if name.startswith("hydra._internal"):
        yield f"imports {name}, a private part"


def no_pickle(module: Module) -> Iterator[str]:
    """Hold records and checkpoints free of pickle."""
    for node in nodes(module.tree):
        called = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if called in ("pickle.load", "pickle.dump") or (
            called == "pickle.Unpickler" and module.name not in UNPICKLES
        ):
            yield f"uses {called}: expt writes and reads no pickle"


def sizes(module: Module) -> Iterator[str]:
    """Hold the lengths of files, functions and lines."""
    if (num_lines := len(module.text.splitlines())) > MAX_FILE_LINES:
        yield f"has {num_lines} lines of at most {MAX_FILE_LINES}"
    for node in functions(module.tree):
        if length(node) > MAX_FUNCTION_LINES:
            yield f"{node.name} has {length(node)} lines of at most {MAX_FUNCTION_LINES}"
    for number, line in enumerate(module.text.splitlines(), 1):
        if len(re.sub(r"  # (type|noqa): .*", "", line)) > MAX_COLUMNS:
            yield f"line {number} has more than {MAX_COLUMNS} columns"


def names(module: Module) -> Iterator[str]:
    """Refuse names that say nothing, and names of a run's files outside runs.paths."""
    for part in GRAB_BAGS & set(module.name.lower().split(".")):
        yield f"{part} says nothing of what is inside"
    if module.name != "runs.paths":
        for text in strings(module.tree):
            if any(name in text for name in names_of_a_runs_files()):
                yield f"{text!r} is a name of a run's file, which stands in runs.paths alone"


@functools.cache
def names_of_a_runs_files() -> set[str]:
    """Return those that runs.paths spells."""
    every = strings(modules()["runs.paths"].tree)
    return {name for name in every if re.fullmatch(r"\.?\w+\.\w+", name)}


def strings(tree: ast.Module) -> Iterator[str]:
    """Yield every string that is not a docstring."""
    statements = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}
    for node in nodes(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in statements
        ):
            yield node.value


def explanations(module: Module) -> Iterator[str]:
    """Hold a docstring at every public name."""
    if module.name not in WITHOUT_DOCSTRINGS:
        for name in without_docstring(module.tree, module.name):
            # An override has the docstring of its base class.
            if not inspect.getdoc(pydoc.locate(f"expt.{name}")):
                yield f"expt.{name} has no docstring"


def without_docstring(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[str]:
    """Yield the public names in `node`, and its own, that have none."""
    if not ast.get_docstring(node):
        yield name
    if isinstance(node, ast.Module | ast.ClassDef):
        for below in node.body:
            kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            if isinstance(below, kinds) and below.name[0] != "_":
                yield from without_docstring(below, f"{name}.{below.name}")


def words(module: Module) -> Iterator[str]:
    """Hold docstrings that begin with a verb or a noun, as PyTorch's do."""
    for node in nodes(module.tree):
        value = getattr(node.value, "value", None) if isinstance(node, ast.Expr) else None
        if isinstance(value, str) and (found := ODD_BEGINNING.match(value)):
            yield f"a docstring begins with {found[0]}: {value.partition(chr(10))[0]}"


def plain_words(module: Module) -> Iterator[str]:
    """Hold docstrings and comments free of odd words, in the packages that have been reworded."""
    for text in prose(module):
        if found := ODD_WORDS.search(re.sub("`.*?`", "", text)):
            yield f"{found[0]!r} is not plain in: {' '.join(text.split())}"


def prose(module: Module) -> Iterator[str]:
    """Yield every docstring and comment."""
    for node in nodes(module.tree):
        value = getattr(node.value, "value", None) if isinstance(node, ast.Expr) else None
        if isinstance(value, str):
            yield value
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def private_parts(module: Module) -> Iterator[str]:
    """Hold private parts of torch in one module, which is looked at where torch changes."""
    if module.name != "training.patches" and any(map(is_torch, imported(module.tree))):
        for name in foreign_private_names(module.tree) ^ DOCUMENTED.get(module.name, set()):
            yield f"{name}: a private part, or one of DOCUMENTED that is not used"


def foreign_private_names(tree: ast.Module) -> set[str]:
    """Return private names that are imported, or attributes that no class of expt sets.

    Those of a NamedTuple are public, see its documentation.
    """
    used = {part for name in imported(tree) for part in name.split(".")}
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) != "os._exit":
            used.add(node.attr)
        elif isinstance(node, ast.Call) and re.fullmatch(
            "(get|has|set)attr", ast.unparse(node.func)
        ):
            found = (each.value for each in node.args[1:2] if isinstance(each, ast.Constant))
            used |= set(map(str, found))
    private = {name for name in used if re.match("_(?!_)", name)}
    return private - own_private_names() - {"_fields", "_replace"}


@functools.cache
def own_private_names() -> set[str]:
    """Return the private names that expt itself defines."""
    own = set[str]()
    for node in itertools.chain.from_iterable(nodes(module.tree) for module in modules().values()):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if ast.unparse(node.value) == "self" else set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
    return own


def strategies(module: Module) -> Iterator[str]:
    """Hold the loop free of strategies, and what a learner and they are made of typed."""
    for node in nodes(module.tree):
        name = getattr(node, "id", "") or getattr(node, "name", "") or getattr(node, "attr", "")
        if module.name == "training.loop" and name in (
            "shards",
            "DistributedDataParallel",
            *STRATEGIES,
        ):
            yield f"names {name}, where it is to ask learner.strategy"
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called in ("Learner", *STRATEGIES) and "**" in ast.unparse(node):
            yield f"gives {called} arguments of unknown types: {ast.unparse(node)}"


def features(module: Module) -> Iterator[str]:
    """Hold questions on the kind of a task's targets to datasets, which say what they offer."""
    may_ask = module.component == "data" or module.name == "config.rules"
    for node in nodes(module.tree):
        asked = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "issubclass":
            asked = node.args
        if not may_ask and any(getattr(one, "attr", "") == "takes" for one in asked):
            yield f"asks {ast.unparse(node)}, where it is to call the feature"
        if getattr(node, "attr", getattr(node, "id", "")) == "TARGETS":
            yield "asks a task for a word, TARGETS, where it is to call the feature"


def replacements(module: Module) -> Iterator[str]:
    """Refuse to replace parts of other libraries at run time."""
    for name in sorted(set(assigned_of_others(module.tree)) - REPLACED):
        if not name.startswith(SETTINGS):
            yield f"replaces {name}, a part of another library"


def assigned_of_others(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes of what is imported that the source assigns or deletes."""
    known = dict[str, str]()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                known[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom):
            found = {alias.asname or alias.name: alias.name for alias in node.names}
            known |= {name: f"{node.module}.{part}" for name, part in found.items()}
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            root, _, rest = ast.unparse(node).partition(".")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            root, _, rest = ast.unparse(node.args[0]).partition(".")
        else:
            continue
        if not (name := known.get(root, "expt")).startswith("expt"):
            yield f"{name}.{rest}"


EACH: Sequence[Callable[[Module], Iterator[str]]] = (
    *(imports_go_down, imports_of_others, sizes, names, explanations, words, plain_words),
    *(private_parts, replacements, strategies, no_pickle, features),
)


# ---- rules of the whole ----


def the_top() -> Iterator[str]:
    """Hold the list of packages and of files above them."""
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    files = {path.stem for path in PACKAGE.glob("*.py")}
    for name in sorted((packages ^ {*PACKAGES}) | (files ^ {*DOORS, *GROUND})):
        yield f"expt/{name} is there and unknown to {Path(__file__).name}, or known and not there"


def no_import_goes_round() -> Iterator[str]:
    """Refuse circles of imports at run time."""
    graph = {name: own_imports(module) for name, module in modules().items() if name != "__init__"}
    for name in graph:
        # Two files whose types name each other are not a cycle at run time.
        for node in nodes(modules()[name].tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                graph[name] -= own_imports(Module(name, ast.Module(node.body, []), ""))
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        yield f"imports go round: {' -> '.join(error.args[1])}"


def plugins() -> Iterator[str]:
    """Hold Hydra's plugins free of its private parts, too."""
    for path in sorted((ROOT / "hydra_plugins").glob("*.py")):
        for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            yield from (f"hydra_plugins/{path.name} {what}" for what in private_of_hydra(name))


def budgets() -> Iterator[str]:
    """Hold the size of each package, of the tests, and the number of files."""

    def lines(folder: Path) -> int:
        return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))

    if (size := lines(PACKAGE)) > MAX_LINES_IN_ALL:
        yield f"expt has {size} lines of at most {MAX_LINES_IN_ALL}"
    for name, most in MAX_LINES.items():
        if (size := lines(PACKAGE / name)) > most:
            yield f"expt/{name} has {size} lines of at most {most}"
    if (size := lines(ROOT / "tests")) > MAX_TEST_LINES:
        yield f"tests has {size} lines of at most {MAX_TEST_LINES}"
    if len(modules()) > MAX_FILES:
        yield f"expt has {len(modules())} files of at most {MAX_FILES}"
    every = [length(one) for module in modules().values() for one in functions(module.tree)]
    if (median := statistics.median(every)) > MAX_MEDIAN_LINES:
        yield f"half of the functions have more than {median:g} lines"


def pages() -> Iterator[str]:
    """Hold the width of text in pages; commands, what they print, and tables may be wider."""
    for path in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))):
        is_text = True
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            is_text ^= line.lstrip().startswith("```")
            is_prose = is_text and not line.startswith(("|", "    ", "<!--", "#"))
            if is_prose and len(line) > MAX_COLUMNS_OF_PAGES and " " in line.strip():
                where = f"{path.relative_to(ROOT)}:{number}"
                yield f"{where} has more than {MAX_COLUMNS_OF_PAGES} columns"


WHOLE: Sequence[Callable[[], Iterator[str]]] = (
    the_top,
    no_import_goes_round,
    plugins,
    budgets,
    pages,
)


def main() -> int:
    """Print what is wrong; return 1 if something is."""
    found = [problem for rule in WHOLE for problem in rule()]
    for module in modules().values():
        found += (f"expt.{module.name}: {problem}" for rule in EACH for problem in rule(module))
    print("\n".join(found) or f"{len(modules())} modules: no problem")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
