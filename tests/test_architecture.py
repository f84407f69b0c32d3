"""What imports of expt bring, and that each rule of scripts/architecture.py can fail."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from expt.config.groups import GROUPS
from scripts import architecture
from scripts.architecture import Module
from tests.facade import python

# What is imported before a run's workers are started: torch is imported beside it, by a forkserver.
DOORS = (
    *("expt.__main__", "expt.api", "expt.command.main", "expt.command.invoke"),
    *("expt.command.sweep", "expt.command.predict", "expt.launch.local", "expt.launch.pool"),
)


def test_the_driver_imports_neither_torch_nor_numpy() -> None:
    kinds = {cls.__module__ for group in ("task", "dataset") for cls in GROUPS[group].values()}
    late = "print(*{'torch', 'torchvision', 'tensorboard', 'numpy'} & {*sys.modules})"
    source = f"import sys, {', '.join((*DOORS, *sorted(kinds)))}; {late}"
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, check=True)
    assert found.stdout.split() == []


RULES: list[tuple[Callable[[Module], Iterator[str]], str, str]] = [
    (architecture.imports_go_down, "data.x", "from expt.training import loop"),
    (architecture.imports_go_down, "data.x", "importlib.import_module(f'expt.tasks.{name}')"),
    (architecture.imports_go_down, "machine", "import expt.progress"),
    (architecture.imports_of_others, "command.x", "from hydra import compose"),
    (architecture.imports_of_others, "command.compose", "import hydra._internal.utils"),
    (architecture.imports_of_others, "config.x", "def f():\n    import torch"),
    (architecture.imports_of_others, "training.x", "import torchvision"),
    (architecture.sizes, "data.x", "a = 1\n" * 501),
    (architecture.sizes, "data.x", "def f():\n" + "    a = 1\n" * 60),
    (architecture.sizes, "data.x", f"a = '{'a' * 96}'"),
    (architecture.names, "data.utils", ""),
    (architecture.names, "data.x", "path = f'{folder}/result.json'"),
    (architecture.explanations, "data.x", "'''A module.'''\nclass A:\n    pass"),
    (architecture.no_pickle, "runs.x", "class Reader(pickle.Unpickler):\n    pass"),
    (architecture.no_pickle, "runs.x", "state = pickle.load(file)"),
    (architecture.words, "runs.x", "def f():\n    'Whether it is.'"),
    (architecture.plain_words, "runs.x", "'''Two files are alike.'''"),
    (architecture.plain_words, "runs.x", "a = 1  # of which there is one"),
    (architecture.plain_words, "runs.x", "'''Return what is missing.'''"),
    *(
        (architecture.private_parts, "data.x", f"import torch\n{source}")
        for source in (
            "from torch.nn.modules.conv import _ConvNd",
            "torch._dynamo.reset()",
            "ddp._get_ddp_logging_data()",
            "getattr(optimizer, '_step_supports_amp_scaling', False)",
            "self._use_python_reducer",
        )
    ),
    (architecture.strategies, "training.loop", "from expt.training.strategy import DDP"),
    (architecture.strategies, "training.loop", "learner.strategy.shards"),
    (architecture.strategies, "worker.x", "Learner(module=module, **fields)"),
    (architecture.features, "worker.x", "if config.task.takes is Classes:\n    pass"),
    (architecture.features, "data.x", "config.task.TARGETS"),
    (architecture.replacements, "data.x", "import torch.nn as nn; nn.Linear.forward = 1"),
    (architecture.replacements, "data.x", "from torch import nn; setattr(nn.Module, 'a', 2)"),
]


@pytest.mark.parametrize(("rule", "name", "source"), RULES)
def test_a_rule_notices(rule: Callable[[Module], Iterator[str]], name: str, source: str) -> None:
    assert len([*rule(Module(name, ast.parse(source), source))]) == 1
    own = "'''A module.'''\nfrom expt import errors\nx.y = loader._batches"
    assert [*rule(Module("data.x", ast.parse(own), own))] == []


def test_names_of_a_runs_files_are_known_and_few_parts_replaced() -> None:
    known = {"result.json", "metrics.jsonl", "last.safetensors", "best.safetensors", "stderr.log"}
    assert {*known, "error.json"} <= architecture.names_of_a_runs_files()
    assert len(architecture.REPLACED) <= 2


SCAN = """
import sys
import expt.worker.main
importers = map(type, (*sys.meta_path, *sys.path_hooks))
found = {str(each) for each in importers if each.__module__.startswith("expt")}
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] in ("expt", "__main__", "__mp_main__", "hydra_plugins", "tests"):
        continue
    for scope in (module, *(each for each in vars(module).values() if isinstance(each, type))):
        if str(getattr(scope, "__module__", name)).startswith("expt"):
            continue
        for attribute, value in list(vars(scope).items()):
            if str(getattr(value, "__module__", "")).partition(".")[0] == "expt":
                found.add(f"{name}: {getattr(scope, '__name__', scope)}.{attribute}")
print("\\n".join(sorted(found)))
"""


def test_a_worker_leaves_others_modules_and_classes_as_they_are(tmp_path: Path) -> None:
    done = python(SCAN, cwd=tmp_path)
    assert (done.returncode, done.stdout.split()) == (0, []), done
