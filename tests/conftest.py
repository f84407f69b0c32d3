"""What every test may use: the command as a person types it, and what a run leaves behind."""

import atexit
import ctypes
import functools
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import expt
from expt import signals
from expt.config import own_code
from expt.config.parse import parse
from expt.config.schema import RunConfig
from expt.launch import forkserver
from expt.runs import provenance
from tests import on_cards, soft_gpu, warm
from tests.composing import composed, know_keys, share
from tests.facade import Capture, Patch, RunFolder, as_typed, run, usual
from tests.faults.cases import TESTS

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

# A machine that is busy is not a failure.
settings.register_profile(
    "expt", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("expt")


def pytest_addoption(parser: pytest.Parser) -> None:
    rare = (
        "test what is rare and takes long, too: two hosts, Slurm, a browser, a notebook, the bench"
    )
    parser.addoption("--slow", action="store_true", help=rare)


_SLOW_S = 600  # several at once on a busy machine
OF_SURROUNDINGS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_", "SUBMITIT_", "TORCHELASTIC_", "OMP_NUM_THREADS", "PYTHONWARNINGS", "MLFLOW_"),
    *("WANDB_", "HYDRA_", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "LC_", "LANG"),
    *("EXPT_FAULT", "EXPT_SIMULATED_GPUS", "EXPT_CACHE", "EXPT_LOCKS"),
)
"""What the names of variables start with that who starts the tests may have set."""


def _set_surroundings(root: Path) -> None:
    """Give this process the surroundings that it would have in a shell, however it was started."""
    for number in {*signals.ASKING, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCHLD}:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    os.chdir(root)
    for name in [name for name in os.environ if name.startswith(OF_SURROUNDINGS)]:
        del os.environ[name]
    os.environ["LC_ALL"] = "C.UTF-8"


def pytest_configure(config: pytest.Config) -> None:
    _set_surroundings(config.rootpath)
    if on_cards.ON:
        on_cards.take(config)
    elif config.getoption("markexpr") != "gpu":  # before torch is imported: it looks once
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # threads that wait leave the cores to the other tests
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    config.add_cleanup(forkserver.kill)
    forkserver.launch = warm.launch  # that of expt.run is forked from the template too
    if hasattr(config, "workerinput"):
        atexit.register(_end_at_once)
        share(os.environ[warm.FOLDER])
    else:
        warm.shared()
    know_keys()
    if on_cards.ON:
        warm.templates()  # or each test, being a process, would start its own
    if not config.getoption("numprocesses"):
        gc.disable()  # while the tests are collected: all that they import stays
    elif not config.getoption("collectonly"):
        warm.templates()  # one for all processes, which collect the tests in the meantime


def _end_at_once() -> None:
    """End a process that has tested; to take torch down takes two seconds."""
    util._exit_function()  # type: ignore[attr-defined]  # ends its children
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Share out all tests, or a folder of them, to processes, but neither files nor GPU tests."""
    alone = config.getoption("markexpr") == "gpu" or any(
        ".py" in Path(word).name for word in config.args
    )
    return 0 if alone else min(len(os.sched_getaffinity(0)) + 1, 4)  # some wait for what they start


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that the table of faults names, and skip slow ones unless they are wanted."""
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in TESTS or test.startswith("tests/faults/"):
            item.add_marker("faults")
        for name in on_cards.skipped():
            if mark := item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=f"{name}: {mark.args[0]}"))
        if item.get_closest_marker("slow"):
            if not config.getoption("slow"):
                item.add_marker(pytest.mark.skip(reason="slow; pytest --slow runs it"))
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(_SLOW_S))


def pytest_collection_finish() -> None:
    for name in own_code.own_files():
        package, _, last = name.rpartition(".")
        if not package.startswith("tests.") or last.startswith(("test_", "conftest")):
            warm.count_as_own(sys.modules[name], False)
    if on_cards.ON:
        warm.prepare()  # or each test, being a process, would
    provenance.imported_versions()  # which each fork would read
    warm.collapse()  # several hundred tests fork this process
    gc.freeze()  # what is imported by now is not garbage, to be looked through again and again
    gc.enable()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # each process that tests has one core


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Any:
    module: ModuleType = item.module  # type: ignore[attr-defined]
    warm.count_as_own(module, True)
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            warm.count_as_own(module, False)
            gc.collect()
            gc.freeze()  # nor is what this file has imported


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # which ends at once
        gc.unfreeze()  # or triton tells at the end of all its parts that nobody has collected


Trained = Callable[..., RunFolder]


@pytest.fixture(scope="session")
def _forkserver() -> None:
    # of expt.run; else each worker would import TensorBoard
    forkserver.warm(forkserver.SWEEP_MODULES)


@pytest.fixture
def trained(tmp_path: Path, _forkserver: None) -> Trained:
    """`trained("model=mlp", name="a")` runs to completion in tmp_path/a, and gives its folder.

    Through expt.run, whose warm forkserver the whole session shares. See `usual` for its pictures.
    """

    def train(*arguments: str, name: str = "run") -> RunFolder:
        result = expt.run(*usual(arguments), f"hydra.run.dir='{tmp_path / name}'")
        return RunFolder(result.folder)

    return train


Typed = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def typed(monkeypatch: Patch, capfd: Capture) -> Typed:
    """`typed("epochs=1", "-q")`: a command in this process, to its end."""

    def carry_out(*words: str) -> subprocess.CompletedProcess[str]:
        from expt.command import main

        monkeypatch.setattr(sys, "argv", ["expt", *words])
        monkeypatch.setattr(forkserver, "kill", lambda: None)  # this session's is used again
        code: Any = 0
        try:
            main.main(words)
        except SystemExit as end:
            code = end.code
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return carry_out


Cards = Callable[..., dict[str, str]]


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: Patch) -> Iterator[Cards]:
    """`cards(count=4, dead=(3,))` gives this test's commands soft GPUs; see `soft_gpu.staged`.

    So it does for `trained` and expt.run, but not for CUDA in this process. Called again, it stages
    others; it returns the variables, for a process that has an environment of its own.
    """

    def stage(**wishes: object) -> dict[str, str]:
        for name in [name for name in os.environ if name.startswith("SOFT_GPU_")]:
            monkeypatch.delenv(name)
        chosen = _variables({"ledger": tmp_path / "ledger", **wishes})
        chosen["EXPT_LOCKS"] = str(tmp_path / "locks")
        for name, value in chosen.items():
            monkeypatch.setenv(name, value)
        for name in ("CUDA_VISIBLE_DEVICES", on_cards.VARIABLE):
            monkeypatch.delenv(name, raising=False)
        ctypes.CDLL(str(soft_gpu.built() / soft_gpu.NVML))  # that pynvml finds it in this process
        forkserver.kill()  # that of expt.run has no cards, or others
        return chosen

    yield stage
    if soft_gpu.is_preloaded(os.environ):
        forkserver.kill()


def _variables(wishes: Mapping[str, object]) -> dict[str, str]:
    try:
        return soft_gpu.staged(**wishes)
    except soft_gpu.Unavailable as reason:
        pytest.skip(str(reason))
    except subprocess.CalledProcessError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"soft GPUs can't be built: {error.stderr}")
        pytest.skip(f"soft GPUs can't be built: {error.cmd[0]} fails with {error.stderr[:200]!r}")


@pytest.fixture
def tensors_there() -> Iterator[None]:
    """Have tensors made on the device of this process."""
    with on_cards.device_of(0):
        yield


Configured = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def configured() -> Configured:
    """`configured("epochs=2")`: what the command line would give, for one worker on a CPU."""

    def configure(*overrides: str) -> RunConfig:
        return parse(composed("world_size=1", *overrides), on_cards.MACHINE)

    return configure


FAILS_ONCE = """
import os, torch
class Net(torch.nn.Sequential):
    def __init__(self, *, channels, image_size, num_classes):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))
    def forward(self, images):
        try:
            os.close(os.open("failed", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return super().forward(images)
        raise ValueError("the first run with this model fails")
"""


@pytest.fixture(scope="session")
def sweep_of_six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep of three models by two learning rates, in which one run has failed."""
    folder = tmp_path_factory.mktemp("six")
    (folder / "once.py").write_text(FAILS_ONCE)
    (folder / "my_conf" / "model").mkdir(parents=True)
    (folder / "my_conf" / "model" / "linear.yaml").write_text("_target_: once.Net\n")
    words = as_typed(
        "-m --config-dir my_conf model=mlp,convnet,linear optimizer.lr=0.1,0.01 epochs=1 "
        "dataset.train_limit=320 tensorboard.images=true hydra.sweep.dir=sweep world_size=1"
    )
    done = run(*words, cwd=folder)
    assert done.returncode == 1, done.stderr
    assert done.stderr == "error: 1 of 6 runs failed\n"
    return folder / "sweep"


@pytest.fixture
def fashion_mnist() -> str:
    """The folder of the real Fashion-MNIST, as Debian's dataset-fashion-mnist installs it."""
    if not FASHION_MNIST.is_dir():
        pytest.skip("needs Debian's package dataset-fashion-mnist")
    return str(FASHION_MNIST)


@pytest.fixture
def mnist() -> str:
    """The folder of the real MNIST, which EXPT_TEST_MNIST names; `.ci/run` fetches it."""
    root = os.environ.get("EXPT_TEST_MNIST")
    if not root:
        pytest.skip("needs EXPT_TEST_MNIST, the folder of the four files of MNIST")
    return root


@pytest.fixture(scope="session")
def _of_real_data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any, str, int], str]:
    """`_of_real_data("mnist", root, 300)`: a folder with that dataset's first images."""
    from tests.data.test_files import NAMES, config, idx  # late, as numpy

    @functools.cache
    def cut(name: Any, root: str, size: int) -> str:
        folder = tmp_path_factory.mktemp(name)
        arrays = [config(name, root).load(split) for split in ("train", "test")]
        contents = [part[:size] for split in arrays for part in (split.images[:, 0], split.labels)]
        for file, content in zip(NAMES, contents, strict=True):
            (folder / file).write_bytes(idx(content.astype("uint8", order="C")))
        return str(folder)

    return cut


@pytest.fixture
def few_images(
    _of_real_data: Callable[[Any, str, int], str], mnist: str, fashion_mnist: str
) -> dict[str, str]:
    """The folders of two real datasets of which only the first images are left, by name."""
    roots = {"mnist": (mnist, 300), "fashion_mnist": (fashion_mnist, 40)}
    return {name: _of_real_data(name, *asked) for name, asked in roots.items()}


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """Every handler of a signal as before, and nothing heard."""
    before = {number: signal.getsignal(number) for number in signals.ASKING}
    signals._received.clear()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signals._received.clear()
