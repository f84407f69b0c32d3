"""A person's own source is known by what it says, without running it."""

import importlib.machinery
import importlib.util
import json
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from expt.config import kept_code, own_code
from expt.config.identity import shown
from expt.config.own_code import fingerprint, targets
from expt.errors import ConfigError
from tests.conftest import Configured
from tests.facade import Patch


@pytest.fixture(autouse=True)
def _imports_are_forgotten() -> Iterator[None]:
    with own_code.as_on_disk():
        yield


@pytest.fixture
def own(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder on the path, with a module, and a package of which one part imports another."""
    (tmp_path / "my_net.py").write_text(
        "import my_layers\nimport torch\nraise RuntimeError('was run')\n"
    )
    (tmp_path / "my_layers.py").write_text("WIDTH = 3\n")
    package = tmp_path / "my_package"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('was run')\n")
    (package / "deep/__init__.py").write_text("")
    (package / "deep/net.py").write_text("from ..parts import Part\nfrom . import same\n")
    (package / "deep/same.py").write_text("")
    (package / "bare").mkdir()
    (package / "bare/net.py").write_text("")
    (package / "parts.py").write_text("class Part: ...\n")
    (package / "other.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "edited"),
    [
        ("my_net.Net", "my_net.py"),
        ("my_net.Net", "my_layers.py"),
        ("my_package.deep.net.Net", "my_package/deep/net.py"),
        ("my_package.deep.net.Net", "my_package/parts.py"),
        ("my_package.deep.net.Net", "my_package/deep/same.py"),
        ("my_package.deep.net.Net", "my_package/__init__.py"),
        ("my_package.bare.net.Net", "my_package/bare/net.py"),
    ],
)
def test_an_edited_source_is_another(own: Path, name: str, edited: str) -> None:
    before = fingerprint([name])
    assert before == fingerprint([name])
    assert before is not None
    with (own / edited).open("a") as file:
        file.write("# edited\n")
    assert fingerprint([name]) != before


def test_what_is_not_imported_does_not_count(own: Path) -> None:
    before = fingerprint(["my_package.deep.net.Net", "my_net.Net"])
    (own / "my_package/other.py").write_text("X = 1\n")
    assert fingerprint(["my_package.deep.net.Net", "my_net.Net"]) == before


def test_the_same_source_elsewhere_is_the_same(
    own: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = fingerprint(["my_net.Net"])
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("my_net.py", "my_layers.py"):
        (own / name).rename(elsewhere / name)
    assert fingerprint(["my_net.Net"]) is None
    sys.path.insert(0, str(elsewhere))
    try:
        assert fingerprint(["my_net.Net"]) == before
    finally:
        sys.path.remove(str(elsewhere))


@pytest.mark.parametrize(
    "name",
    ["torch.optim.RMSprop", "collections.OrderedDict", "no.such.Thing", "expt.models.vision.MLP"],
)
def test_an_installed_class_is_known_by_its_version(name: str) -> None:
    assert fingerprint([name]) is None


def test_a_source_that_does_not_parse_counts_all_the_same(own: Path) -> None:
    (own / "my_net.py").write_text("def broken(:\n")
    before = fingerprint(["my_net.Net"])
    (own / "my_net.py").write_text("def broken((:\n")
    assert before != fingerprint(["my_net.Net"])


def test_what_was_imported_before_is_imported_anew(own: Path) -> None:
    name = "my_package.parts"
    (own / "my_package/__init__.py").write_text("")
    (own / "my_package/parts.py").write_text("from my_layers import WIDTH\n")
    assert importlib.import_module(name).WIDTH == 3
    (own / "my_layers.py").write_text("WIDTH = 12345\n")  # of another size, maybe of the same time
    with own_code.as_on_disk():
        assert importlib.import_module(name).WIDTH == 12345
    assert importlib.import_module(name).WIDTH == 3, "this process keeps what it had"


NESTED = {
    "optimizer={_target_: a.Opt, inner: [{_target_: a.Deep, x: {_target_: a.B}}]}":
        "a.Opt a.Deep a.B",
    "dataset={_target_: a.Data, num_classes: 2, x: {_target_: a.T}, train: {x: {_target_: a.C}}}":
        "a.Data a.T a.C",
    "callbacks=[{_target_: a.Watch, of: {_target_: a.D}}]": "a.Watch a.D",
    "+task.metrics.own={_target_: a.Metric, better: max, of: {_target_: a.Deep}}":
        "a.Metric a.Deep",
    "dataset.transforms=[{_target_: a.B, then: [{_target_: a.Deep}]}]": "a.B a.Deep",
}  # fmt: skip


@pytest.mark.parametrize("word", NESTED)
def test_the_classes_among_arguments_count_too(configured: Configured, word: str) -> None:
    group = [f"~{key}" for key in ("optimizer", "dataset") if word.startswith(f"{key}=")]
    config = configured(*group, "+" * len(group) + word)
    assert {*targets(config)} == {*NESTED[word].split()}
    again = targets(json.loads(json.dumps(shown(config))))
    assert again == targets(config), "else such a run would be stale"


NAME = "twice_written.parts.Part"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder on the path with a package whose module imports another."""
    folder = tmp_path / "twice_written"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "parts.py").write_text(
        "from twice_written.width import WIDTH\nclass Part:\n    width = WIDTH\n"
    )
    _write(folder, 1)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return folder


def _write(package: Path, width: int) -> Path:
    """The module that is imported, always of one size and one time."""
    (file := package / "width.py").write_text(f"WIDTH = {width}\n")
    os.utime(file, (1, 1))
    return file


def _width(package: Path, *, checked: bool = True) -> int:
    """What a new process imports, once the caches are checked."""
    with own_code.as_on_disk():
        if checked:
            own_code.check_caches(own_code.own_modules([NAME]).values())
    command = [sys.executable, "-c", "from twice_written.parts import Part; print(Part.width)"]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    options: Any = {"cwd": package.parent, "env": env, "capture_output": True, "check": True}
    return int(subprocess.run(command, **options).stdout)


def test_a_cache_of_other_source_of_the_same_size_and_time_is_not_taken(package: Path) -> None:
    assert _width(package, checked=False) == 1
    _write(package, 2)
    assert _width(package, checked=False) == 1, "Python takes one for the other"
    assert _width(package) == 2
    _write(package, 3)
    assert _width(package, checked=False) == 3, "and from then on does not"


def test_a_source_is_compiled_once_and_its_cache_is_for_the_same_eyes(package: Path) -> None:
    (file := package / "width.py").chmod(0o600)
    own_code.check_caches([file])
    cached = Path(importlib.util.cache_from_source(str(file)))
    assert cached.stat().st_mode & 0o777 == 0o600
    before = cached.stat().st_ino
    own_code.check_caches([file])
    assert cached.stat().st_ino == before


def test_a_cache_that_cannot_be_written_is_left_alone(package: Path, monkeypatch: Patch) -> None:
    (package / "parts.py").write_text("def broken(:")
    (package / "__pycache__").touch()
    own_code.check_caches(package.iterdir())
    (package / "__pycache__").unlink()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    own_code.check_caches(package.iterdir())
    assert not (package / "__pycache__").exists()


def test_the_modules_of_a_run_are_compared_with_their_source_then(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Also a module that no import statement names, and where the project has moved."""
    (project := tmp_path / "here").mkdir()
    (lib := project / "lib").mkdir()
    (file := lib / "found_by_name.py").write_text("X = 1\n")
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend("lib")
    importlib.import_module("found_by_name")
    record = {"imported": {"found_by_name": own_code.as_imported()["found_by_name"]}}
    file.write_text("X = 2\n")
    assert record["imported"]["found_by_name"]["file"] == "lib/found_by_name.py"
    assert own_code.changed(record) == ["found_by_name"]
    file.write_text("X = 1\n")
    assert not own_code.changed(record)
    lib.rename(project / "other")
    assert own_code.changed(record), "it is gone"
    monkeypatch.syspath_prepend("other")
    assert not own_code.changed(record)


def test_source_is_compared_with_what_would_be_imported_now(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Of a copied project that is the copy's, also while the original is still there."""
    monkeypatch.chdir(tmp_path)
    for name in ("here", "third/here"):
        (tmp_path / name / "taken").mkdir(parents=True)
        (tmp_path / name / "taken/__init__.py").write_text(f"X = '{name}'\n")
    (tmp_path / "here/copied.py").write_text("X = 1\n")
    path = [str(tmp_path / "here"), *sys.path]
    monkeypatch.setattr(sys, "path", [str(tmp_path / "third/here"), *path])  # as its import does
    for name in ("copied", "taken"):
        importlib.import_module(name)
    found = own_code.as_imported(path=path)
    record = {"imported": {name: found[name] for name in ("copied", "taken")}}
    shutil.copytree("here", "there")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "there"), *path[1:]])
    Path("here/copied.py").write_text("X = 2\n")
    assert own_code.changed(record) == [], "the original was edited"
    Path("there/copied.py").write_text("X = 3\n")
    assert own_code.changed(record) == ["copied"]
    Path("here/copied.py").write_text("X = 1\n")
    assert own_code.changed(record) == ["copied"], "the original is as it was"
    monkeypatch.setattr(sys, "path", path)
    assert own_code.changed(record) == []


def test_a_module_in_a_zip_has_the_hash_of_the_zip(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("lib.zip", "w") as archive:
        archive.writestr("in_zip.py", "X = 1\n")
    monkeypatch.syspath_prepend("lib.zip")
    importlib.import_module("in_zip")
    record = {"imported": {"in_zip": own_code.as_imported()["in_zip"]}}
    assert not own_code.changed(record)
    with zipfile.ZipFile("lib.zip", "w") as archive:
        archive.writestr("in_zip.py", "X = 2\n")
    assert own_code.changed(record) == ["in_zip"]


def test_a_new_module_in_a_package_that_a_run_has_searched_is_seen(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    (folder := tmp_path / "plugins").mkdir()
    for name in ("__init__", "one", "two"):
        (folder / f"{name}.py").write_text("X = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("plugins.one")
    assert own_code.as_imported().keys() >= {"plugins", "plugins.one"}
    assert "plugins.*" not in own_code.as_imported(), "one was imported by its name"
    importlib.import_module("plugins.two")
    named = ["plugins", "plugins.one", "plugins.two"]
    assert "plugins.*" not in own_code.as_imported(named), "import statements name all"
    record = {"imported": own_code.as_imported(["plugins"])}
    (folder / "two.py").write_text("X = 2\n")
    assert own_code.changed(record) == ["plugins.two"]
    (folder / "two.py").write_text("X = 1\n")
    (folder / "notes.txt").touch()
    assert own_code.changed(record) == []
    (folder / "three.py").touch()
    assert own_code.changed(record) == ["plugins.*"]
    (folder / "three.py").unlink()
    (tmp_path / "lib").mkdir()
    folder.rename(tmp_path / "lib/plugins")
    monkeypatch.syspath_prepend("lib")
    assert own_code.changed(record) == [], "the project may have moved"


def test_a_module_of_a_file_is_seen_where_it_is_among_the_modules(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """As docs/own.md says it: one that is not there is not seen."""
    monkeypatch.chdir(tmp_path)
    for name in ("registered_one", "hidden_one"):
        (file := tmp_path / f"{name}.py").write_text("X = 1\n")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        if name == "registered_one":
            monkeypatch.setitem(sys.modules, name, module)
        assert spec.loader is not None
        spec.loader.exec_module(module)
    found = own_code.as_imported()
    assert found["registered_one"]["file"] == "registered_one.py"
    assert "hidden_one" not in found
    (tmp_path / "registered_one.py").write_text("X = 2\n")
    assert own_code.changed({"imported": found}) == ["registered_one"]


EARLY = """
import dataclasses, enum, functools
from os.path import join
class Net:
    width = 3
    def forward(self, x): return x
    @property
    def size(self): return [n for n in range(3)]
    @classmethod
    def made(cls): return cls()
    @functools.cache
    def kept(self): return 1
    same = forward
@dataclasses.dataclass
class Row:
    x: float = float("nan")
class Kind(enum.Enum):
    A = 1
def decorated(function):
    @functools.wraps(function)
    def call(): return function()
    return call
@decorated
def one(): return -0.0
two = lambda: one
"""


@pytest.mark.parametrize(
    ("edit", "is_seen"),
    [
        (lambda text: text.replace("return x", "return -x"), True),
        (lambda text: text.replace("return cls()", "return None"), True),
        (lambda text: text.replace("lambda: one", "lambda: two"), True),
        (lambda text: text.replace("width = 3", "width = 4"), False),
        (lambda text: text + "def three(: pass", True),
        (lambda text: text + "# the end", False),
        (lambda text: text, False),
    ],
)
@pytest.mark.parametrize("is_cached", [True, False])
def test_an_edit_before_the_first_look_is_seen_by_the_functions(
    tmp_path: Path, monkeypatch: Patch, edit: Callable[[str], str], is_seen: bool, is_cached: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", not is_cached)
    monkeypatch.syspath_prepend(str(tmp_path))
    (file := tmp_path / "early.py").write_text(EARLY)
    net = importlib.import_module("early").Net
    monkeypatch.setattr(net, "kept", lambda: 3)  # by someone else
    file.write_text(edit(EARLY))
    os.utime(file, (1, 1))
    assert own_code.older_here(["early.Net"]) == ["early.py"] * is_seen
    with own_code.as_on_disk():
        if "def three(" not in file.read_text():
            importlib.import_module("early")
            assert own_code.older_here(["early.Net"]) == []


class Rewriting(importlib.machinery.SourceFileLoader):
    """Runs something else than its file says, as those of type checkers do."""

    def exec_module(self, module: Any) -> None:
        exec(compile("def f(): return 2", str(self.path), "exec"), vars(module))


def test_a_module_whose_loader_rewrites_it_is_not_said_to_be_edited(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    (file := tmp_path / "rewritten.py").write_text("def f(): return 1")
    spec: Any = importlib.util.spec_from_loader("rewritten", Rewriting("rewritten", str(file)))
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "rewritten", module)
    spec.loader.exec_module(module)
    assert module.f() == 2
    assert own_code.as_imported()["rewritten"]["hash"] == own_code.hash_now(str(file))


def test_what_is_imported_anew_is_looked_at_anew(tmp_path: Path, monkeypatch: Patch) -> None:
    (file := tmp_path / "reloaded.py").write_text("X = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("reloaded")
    record = {"imported": {"reloaded": own_code.as_imported()["reloaded"]}}
    file.write_text("X = 22\n")
    assert own_code.older_here(["reloaded.X"]) == [os.path.relpath(file)]
    assert own_code.is_imported(record)
    assert not own_code.older_here(["reloaded.X"], record), "the run has imported that too"
    importlib.reload(module)
    assert not own_code.older_here(["reloaded.X"])
    assert not own_code.is_imported(record)


def test_only_code_that_this_user_has_kept_is_imported(tmp_path: Path, monkeypatch: Patch) -> None:
    """Not that of somebody else, nor what somebody has changed or added."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "mine"))
    own = tmp_path / "own"
    own.mkdir()
    (own / "expt_main_0.py").write_text("X = 1\n")
    kept_code.sign(own)
    copies = {name: shutil.copytree(own, tmp_path / name) for name in ("copy", "edited", "more")}
    (copies["edited"] / "expt_main_0.py").write_text("X = 2\n")
    (copies["more"] / "expt_main_0.so").touch()
    for name in ("own", "copy"):
        kept_code.find_kept(tmp_path / name)
    for name in ("edited", "more"):
        with pytest.raises(ConfigError):
            kept_code.find_kept(tmp_path / name)
    (linked := shutil.copytree(own, tmp_path / "linked") / "torch").symlink_to(copies["edited"])
    with pytest.raises(ConfigError):
        kept_code.find_kept(linked.parent)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    assert not kept_code.is_signed(own)
    kept_code.find_kept(copies["edited"], trust=True)
    assert str(copies["edited"]) in sys.path
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    assert kept_code.is_signed(copies["more"]), "nobody has a key here, and it is our file"


def test_no_cache_is_run_in_place_of_signed_code(tmp_path: Path, monkeypatch: Patch) -> None:
    """Python takes one whose flags say so for that of any source."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "mine"))
    (folder := tmp_path / "code").mkdir()
    (file := folder / "expt_main_1.py").write_text("X = 1\n")
    kept_code.sign(folder)
    for _ in range(2):  # Python's own cache is no reason to refuse
        file.write_text("X = 2\n")
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(file), invalidation_mode=mode)
        file.write_text("X = 1\n")
        kept_code.find_kept(folder)
        assert importlib.import_module("expt_main_1").X == 1
        sys.path.remove(str(folder))
        del sys.modules["expt_main_1"]
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)  # Python may write none
    (folder / "__pycache__").touch()  # which removing caches leaves
    with pytest.raises(ConfigError, match="__pycache__: can't be removed"):
        kept_code.find_kept(folder)


def test_a_folder_that_pip_has_filled_is_not_ones_own(tmp_path: Path, monkeypatch: Patch) -> None:
    """As by `pip install --target`; a package's own source may lie next to such a folder too."""
    for name in ("filled", "own"):
        (tmp_path / name / "tool-1.0.dist-info").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path / name)
    monkeypatch.syspath_prepend(tmp_path / "plain")
    monkeypatch.chdir(tmp_path / "own")
    found = [own_code.is_installed(tmp_path / each / "tool.py") for each in ("filled", "own")]
    assert (*found, own_code.is_installed(tmp_path / "plain/tool.py")) == (True, False, False)
