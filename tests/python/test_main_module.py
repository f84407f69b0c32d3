"""A class of `__main__` as a module: the same class, under a name of its own code."""

import importlib
import inspect
import linecache
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import expt
from expt.config import own_code
from expt.errors import ConfigError
from expt.python import main_module
from tests.facade import Capture, Patch, environment, python

Script = Callable[..., types.ModuleType]

SCRIPT = '''
from __future__ import annotations
import math
from dataclasses import dataclass
from math import pi as PI
from pathlib import Path

import torch
from torch import nn, relu
from torch.nn import functional as F

WIDTH, PATH = 12, Path("a")
SLOPES = [0.1, 0.2]
unused = torch.ones(3)

def scaled(x):
    return x * SLOPES[0] * PI

@dataclass(frozen=True)
class Settings:
    size: int = WIDTH

if True:
    class Base(nn.Module):
        def forward(self, x: Settings) -> torch.Tensor:
            unused = relu(scaled(x))
            return torch.nn.functional.gelu(unused) + math.e

class Net(Base):
    """With all that a class may have."""

    settings = Settings
    @property
    def size(self):
        return self.settings().size
    @staticmethod
    def act(x, by=scaled):
        return [by(each) for each in x]
    def __init__(self, width=WIDTH, *, path=PATH):
        super(Net, self).__init__()
        self.width, self.path = width, path

class Wider(Net):
    factor = 2
'''


@pytest.fixture
def script(tmp_path: Path, monkeypatch: Patch) -> Script:
    """`script(TEXT)` runs it as `__main__`, as `python FILE` does."""

    def begun(
        text: str = SCRIPT, file: str = "script.py", name: str = "__main__"
    ) -> types.ModuleType:
        path = tmp_path / file if not file.startswith("<") else Path(file)
        if path.parent == tmp_path:
            path.write_text(text)
        linecache.checkcache(str(path))
        module = types.ModuleType(name)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, "__main__", module)
        exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))
        return module

    return begun


@pytest.mark.parametrize("name", main_module.NAMES)
def test_it_is_the_same_class_elsewhere(name: str, script: Script) -> None:
    text = SCRIPT.replace("settings = Settings", f"settings, name = Settings, {name!r}")
    main = script(text, name=name)
    names = {name: main_module.dotted("model", vars(main)[name]) for name in ("Net", "Wider")}
    assert imported(names["Net"]) is not main.Net, "here it is a class of its own, too"
    assert main.Net.__module__ == name
    assert main.Net.__init__.__globals__ is vars(main)
    elsewhere = "import sys, pickle; sys.path.append(sys.argv[1])\n" + inspect.getsource(check)
    call = f"{elsewhere}check(**{names!r})"
    folder = Path(sys.modules[names["Net"].partition(".")[0]].__file__ or "").parent
    done = python(call, str(folder), cwd=folder)
    assert done.returncode == 0, done.stderr


def check(Net: str, Wider: str) -> None:
    """Run in a process that has never seen the script."""
    import importlib
    import pickle

    import torch

    net, wider = (
        getattr(importlib.import_module(name.partition(".")[0]), name.partition(".")[2])
        for name in (Net, Wider)
    )
    written = net
    assert written.__module__.startswith("expt_main_")
    assert written().size == 12
    assert written(width=3).width == 3
    x = torch.tensor([0.5, -0.5])
    scaled = torch.nn.functional.gelu(torch.relu(x * 0.1 * 3.141592653589793)) + 2.718281828459045
    assert torch.allclose(written()(x), scaled)
    assert wider.factor == 2
    assert pickle.loads(pickle.dumps(written)) is written


def imported(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_its_name_tells_its_code_and_all_that_it_uses(script: Script) -> None:
    def name(text: str) -> str:
        return main_module.dotted("model", script(text).Wider)

    first = name(SCRIPT)
    assert name(SCRIPT) == first
    for before, after in (
        ("unused = torch.ones(3)", "unused = torch.ones(4)"),
        ("import math", "\n# moved by a comment\nimport math"),
    ):
        assert name(SCRIPT.replace(before, after)) == first, f"{before} counts for nothing"
    for before, after in (
        ("factor = 2", "factor = 3"),
        ("12", "13"),
        ("math.e", "math.pi"),
        ("[0.1,", "[0.3,"),
        ("def act(x, by=scaled)", "def act(x, by=relu)"),
    ):
        assert name(SCRIPT.replace(before, after)) != first, f"{before} counts"


def test_what_a_class_is_now_counts_and_not_its_text(script: Script) -> None:
    text = "import torch\nTABLE = torch.ones(3)\nclass Net:\n    def f(self): return TABLE\n"
    first = main_module.dotted("model", script(text).Net)
    patched = script(text)
    patched.TABLE[0] = 2
    assert main_module.dotted("model", patched.Net) != first
    assert imported(first)().f().tolist() == [1, 1, 1]
    before = imported(main_module.dotted("model", patched.Net))
    patched.__dict__["TABLE"] = 3
    after = imported(main_module.dotted("model", patched.Net))
    assert (before().f().tolist(), after().f()) == ([2, 1, 1], 3), "each module has its own class"
    patched.__dict__["TABLE"] = 4
    assert patched.Net().f() == 4, "and the script's is as it was"
    patched = script(text)
    patched.Net.f = lambda self: 2
    assert imported(main_module.dotted("model", patched.Net))().f() == 2


WRAPPED = """
import functools
@functools.cache
def helper(x):
    return x + 1
def added(x, y):
    return x + y
more = functools.partial(added, 1)
CHOICES = {helper, added}
class Net:
    def f(self, x):
        return helper(x), more(x), len(CHOICES)
"""


def test_wrapped_functions_and_sets_of_them_are_known_by_their_code(script: Script) -> None:
    def name(text: str) -> str:
        return main_module.dotted("model", script(text).Net)

    first = name(WRAPPED)
    assert name(f"\n\n\n{WRAPPED}") == first, "lines count for nothing"
    for before, after in (("x + 1", "x + 2"), ("added, 1", "added, 2"), ("x + y", "x - y")):
        assert name(WRAPPED.replace(before, after)) != first
    assert imported(first)().f(1) == (2, 2, 2)
    folder = Path(sys.modules[first.partition(".")[0]].__file__ or "").parent
    module, _, cls = first.rpartition(".")
    code = f"import sys; sys.path.append(sys.argv[1]); import {module} as m; print(m.{cls}().f(1))"
    done = python(code, str(folder), cwd=folder)
    assert done.stdout.strip() == "(2, 2, 2)", done.stderr


def test_what_cannot_be_pickled_is_refused(script: Script) -> None:
    main = script(
        "import threading\nLOCK = threading.Lock()\nclass Net:\n    def f(self): return LOCK\n"
    )
    with pytest.raises(ConfigError, match="model=Net: cannot be sent to workers"):
        main_module.dotted("model", main.Net)


UNGUARDED = '''
import torch
from torch import nn
import expt

HIDDEN = 8

class Net(nn.Module):
    def __init__(self, *, channels, image_size, num_classes, width=HIDDEN):
        super().__init__()
        height, across = image_size
        first = nn.Linear(channels * height * across, width)
        self.layers = nn.Sequential(nn.Flatten(), first, nn.Linear(width, num_classes))
    def forward(self, images):
        return self.layers(images)

class Watch(expt.Callback):
    def on_epoch_end(self, view):
        print("saw", view.epoch)

model = {"_target_": Net, "width": 5}
short = dict(epochs=2, max_steps=30, world_size=1, quiet=True)
result = expt.run(model=model, callbacks=[Watch], folder="here", **short)
images = torch.linspace(0, 1, 2 * 64).reshape(2, 1, 8, 8)
torch.save(result.load()(images), "outputs.pt")
print("once")
'''  # fmt: skip


@pytest.mark.usefixtures("_forkserver")
def test_unguarded_script_trains_once(
    script: Script, tmp_path: Path, monkeypatch: Patch, capfd: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tracked").touch()
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm a"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    main = script(UNGUARDED)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(".git", "tracked", "script.py", "here", "outputs.pt")
    }
    first: expt.Result = main.result
    assert "saw 2" in (first.folder / "logs/0/0/stdout.log").read_text()
    expected = {"_target_": first.config["model"]["target"], "width": 5}
    assert first.record["overrides"]["model"] == expected
    (tmp_path / "script.py").unlink()  # from here on as another process, which has never seen it
    for name in [name for name in sys.modules if own_code.is_of_main(name)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "expt-main-" not in path])
    images = torch.linspace(0, 1, 2 * 64).reshape(2, 1, 8, 8)
    assert torch.equal(expt.load("here")(images), torch.load("outputs.pt"))
    again = expt.rerun("here", "there")
    assert again.metrics["loss/test"] == first.metrics["loss/test"]
    assert again.record["identity"] == first.record["identity"]
    kept = {path.name for path in (first.folder / "code").glob("*.py")}
    assert len(kept) == 2
    assert kept == {path.name for path in (again.folder / "code").glob("*.py")}
    assert "git does not track" not in capfd.readouterr().err, "the source is in the record"


@pytest.mark.slow
def test_python_runs_such_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNGUARDED)
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr
    loaded = [sys.executable, "-c", "import expt; print(len(expt.load('here').class_names))"]
    assert (
        subprocess.run(loaded, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        == "10\n"
    )
