"""A class of `__main__` as a module: the same class under a name of its own text, or a refusal with
the mend.
"""

from __future__ import annotations

import ast
import importlib
import linecache
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import expt
from expt.config import main_code
from expt.errors import ConfigError
from expt.python import main_module
from tests.conftest import environment

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
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """`script(TEXT)` runs it as `__main__`, as `python FILE` does."""

    def begun(text: str = SCRIPT, file: str = "script.py") -> types.ModuleType:
        path = tmp_path / file if not file.startswith("<") else Path(file)
        if path.parent == tmp_path:
            path.write_text(text)
        linecache.checkcache(str(path))
        module = types.ModuleType("__main__")
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, "__main__", module)
        exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))
        return module

    return begun


def test_it_is_the_same_class_elsewhere(script: Script) -> None:
    main = script()
    for name in ("Net", "Wider", "Settings"):
        dotted = main_module.dotted("model", getattr(main, name))
        assert main_code.is_of_main(dotted)
        module = importlib.import_module(dotted.rpartition(".")[0])
        assert "unused = torch" not in Path(str(module.__file__)).read_text(), "it uses none of it"
        ast.parse(Path(str(module.__file__)).read_text(), feature_version=(3, 10))
    written = importlib.import_module(main_module.dotted("model", main.Net).rpartition(".")[0]).Net
    assert written is not main.Net
    assert vars(written(width=3)) | {"_": 0} == vars(main.Net(width=3)) | {"_": 0}
    assert written().size == 12
    x = torch.tensor([0.5, -0.5])
    assert torch.equal(written().forward(x), main.Net().forward(x))
    wider = importlib.import_module(main_module.dotted("model", main.Wider).rpartition(".")[0])
    assert wider.Wider.__mro__[1] is written, "a definition is one class, whoever uses it"


def test_its_name_tells_its_text_and_all_that_it_uses(script: Script) -> None:
    def name(text: str) -> str:
        return main_module.dotted("model", script(text).Wider)

    first = name(SCRIPT)
    assert name(SCRIPT) == first
    assert name(SCRIPT.replace("unused = torch.ones(3)", "unused = torch.ones(4)")) == first
    for before, after in (
        ("factor = 2", "factor = 3"),
        ("12", "13"),
        ("math.e", "math.pi"),
        ("[0.1,", "[0.3,"),
    ):
        assert name(SCRIPT.replace(before, after)) != first, f"{before} counts"


TABLE = """
TABLE = torch.ones(3)
class Net:
    def f(self): return TABLE
"""
LAMBDA = """
act = lambda x: x
class Net:
    def f(self): return act
"""
GLOBAL = """
calls = 0
class Net:
    def f(self):
        global calls
        calls += 1
"""
PATCHED = """
class Net:
    def f(self): return 1
Net.f = lambda self: 2
"""
SET = """
class Net:
    width = 1
    def f(self): pass
Net.width = 2
"""
ADDED = """
class Net:
    def f(self): pass
Net.g = 1
"""
DEFAULT = """
W = 1
class Net:
    def __init__(self, width=W): pass
W = 2
"""
RENEWED = """
class Base:
    def f(self): pass
class Net(Base):
    def g(self): pass
class Base:
    def f(self): pass
"""
CIRCLE = """
def make(): return Net()
class Net:
    def f(self): return make()
"""
DIFFERS = (
    "its text is not what it is now ({} differs): it, or what it uses, has changed since; run its"
    " cell again"
)
REFUSED = {
    TABLE: (
        "it uses TABLE of the notebook or script, of type torch.Tensor, which no other process has;"
        " let the class make it, or take it as an argument, or put it into a file"
    ),
    LAMBDA: "it uses act, a lambda, which has no text of its own; write it as a def, or",
    GLOBAL: "it changes a global variable, which is another in each worker; put it",
    PATCHED: DIFFERS.format("Net.f"),
    SET: DIFFERS.format("Net.width"),
    ADDED: DIFFERS.format("Net.g"),
    DEFAULT: DIFFERS.format("Net.__init__"),
    RENEWED: "Base has been defined anew since; run the cell of Net again, or",
    CIRCLE: "it and Net use each other",
    "Net = type('Net', (), {})": "its text is not known here, and no worker has this __main__",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_would_be_another_class_is_refused(text: str, script: Script) -> None:
    main = script("import torch\n" + text)
    with pytest.raises(ConfigError) as refused:
        main_module.dotted("model", main.Net)
    assert str(refused.value).startswith(f"model=Net: {REFUSED[text]}")
    assert str(refused.value).endswith("import it from there")


def test_what_was_typed_to_python_itself_is_refused(script: Script) -> None:
    with pytest.raises(
        ConfigError, match=r"its text is not known here.*put it into a file, as with %%writefile"
    ):
        main_module.dotted("model", script("class Net:\n    def f(self): pass", file="<stdin>").Net)


def test_a_file_that_was_edited_meanwhile_is_refused(script: Script, tmp_path: Path) -> None:
    main = script("class Net:\n    def f(self): return 1\n")
    (tmp_path / "script.py").write_text("class Net:\n    def f(self): return 'other'\n")
    linecache.checkcache()
    with pytest.raises(ConfigError, match=r"\(Net\.f differs\)"):
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

result = expt.run(model={"_target_": Net, "width": 5}, callbacks=[Watch], epochs=2, max_steps=30, world_size=2,
                  folder="here", quiet=True)
images = torch.linspace(0, 1, 2 * 64).reshape(2, 1, 8, 8)
torch.save(result.load()(images), "outputs.pt")
print("once")
'''  # fmt: skip


@pytest.mark.usefixtures("_forkserver")
def test_a_script_without_a_guard_trains_its_own_class_once_and_others_have_it(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main = script(UNGUARDED)
    assert {path.name for path in tmp_path.iterdir()} == {
        "script.py",
        "here",
        "outputs.pt",
    }, "no worker runs it again"
    first: expt.Result = main.result
    assert "saw 2" in (first.folder / "logs/0/0/stdout.log").read_text()
    assert first.record["overrides"]["model"] == {
        "_target_": first.config["model"]["target"],
        "width": 5,
    }
    (tmp_path / "script.py").unlink()  # from here on as another process, which has never seen it
    for name in [name for name in sys.modules if main_code.is_of_main(name)]:
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


@pytest.mark.slow
def test_python_runs_such_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNGUARDED)
    command = [sys.executable, "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr
    loaded = [sys.executable, "-c", "import expt; print(len(expt.load('here').class_names))"]
    assert (
        subprocess.run(loaded, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        == "10\n"
    )
