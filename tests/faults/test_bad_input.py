"""Bad input as it is typed: one message with key, value and fix, the exit code, no change."""

import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

import expt
from expt.config.parse import parse
from expt.data.fingerprint import content_of
from expt.errors import ExptError
from expt.launch import local
from expt.machine import Machine
from tests.composing import composed
from tests.conftest import Typed
from tests.facade import Patch, as_typed, environment, request_of, run
from tests.faults.test_disk import _fill


class Bad(NamedTuple):
    """What is typed in the folder that `world` makes, and what comes of it."""

    words: str
    says: str
    """In the one message on stderr, after `error: `: the key, whose explanation may change."""
    code: int = 2
    adds: tuple[str, ...] = ()
    """The only names that may be new in the folder. What was there is as it was, always."""


MNIST = "dataset=mnist dataset.download=false batch_size=8 dataset.root="
PHOTOS = "dataset=image_folder batch_size=4 dataset.root="
FAILED = ("outputs",)  # the workers had begun: the record of a run that failed stays

CASES = {
    # data
    "a missing data file": Bad(f"{MNIST}missing",
        "t10k-labels-idx1-ubyte (plain or .gz) not found in missing/"),
    "a truncated data file": Bad(f"{MNIST}truncated",
        "holds 500 bytes, and its shape (64, 8, 8) makes 4112; delete it"),
    "test images of another size": Bad(f"{MNIST}sizes", "dataset.root=sizes: "),
    "a label out of range": Bad(f"{MNIST}label",
        "label/train-labels-idx1-ubyte holds the label 77, expected 0 to"),
    "no folder of images": Bad(f"{PHOTOS}nowhere", "dataset.root=nowhere: "),
    "an empty class folder": Bad(f"{PHOTOS}empty",
        "no images in the class folder empty/train/b; add some, or"),
    "an unreadable image": Bad(f"{PHOTOS}broken",
        "broken/train/a/1.png cannot be read as an image", adds=("cache",)),
    "fewer images than a batch": Bad(
        f"{MNIST}good batch_size=1000",
        "fewer than batch_size=1000; use batch_size=58, or drop_last=false", adds=FAILED
    ),
    # checkpoints and folders
    "a checkpoint of another model": Bad("resume=trained model=convnet", "model=convnet: "),
    "no checkpoint there": Bad("resume=nowhere", "resume=nowhere: "),
    "a folder without checkpoints": Bad("resume=good", "resume=good: "),
    "a run folder that exists": Bad("hydra.run.dir=trained", "hydra.run.dir=trained: "),
    "a run folder that is a file": Bad("hydra.run.dir=file", "hydra.run.dir=file: "),
    "a sweep folder in a file": Bad("-m seed=0,1 hydra.sweep.dir=file/x",
        "hydra.sweep.dir=file/x: "),
    "a read-only folder": Bad("hydra.run.dir=read_only/x", "hydra.run.dir=read_only/x: "),
    "a full disk": Bad("hydra.run.dir=full/x", "full/x/result.json: ", 1, ("full/x",)),
    # YAML
    "YAML with a wrong type": Bad("--config-dir conf model=type", "model.hidden=3: "),
    "YAML with a tab": Bad("--config-dir conf model=tab", "tab.yaml\", line 2, column 1"),
    "YAML that is not text": Bad("--config-dir conf model=bytes", "conf: "),
    "YAML that names a file that is not there": Bad("--config-dir conf model=asks",
        "model=nothere: "),
    "YAML with an unset variable": Bad("--config-dir conf model=env", "model.hidden: "),
    # words
    "a target that is no model": Bad("'model={_target_: os.system, command: touch called}'",
        "_target_=os.system: "),
    "a wrong key": Bad("bakend=gloo", "bakend=gloo: "),
    "a value with spaces, quoted once": Bad(f"{MNIST}'ünï code'",
        "(plain or .gz) not found in ünï code/"),
}  # fmt: skip
OWN = Bad("--config-dir conf dataset=label world_size=1", "sample 5: ", adds=FAILED)
"""A label that only a worker comes upon."""

FILES = {
    "conf/model/tab.yaml": "name: mlp\n\thidden: [1]\n",
    "conf/model/type.yaml": "name: mlp\nhidden: 3\ndropout: 0.0\n",
    "conf/model/asks.yaml": "defaults: [nothere]\nname: mlp\n",
    "conf/model/env.yaml": "name: mlp\nhidden: ${oc.env:EXPT_NOT_SET}\ndropout: 0.0\n",
    "conf/dataset/label.yaml": "_target_: bad_input_data.Own\nnum_classes: 10\n",
    "file": "not a folder\n",
    "bad_input_data.py": (
        """
import torch

class Own(torch.utils.data.Dataset):
    def __init__(self, train):
        pass

    def __len__(self):
        return 640

    def __getitem__(self, index):
        return torch.zeros(1, 8, 8), 77 if index == 5 else index % 10
"""
    ),
}


def _idx(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def _write_mnist(folder: Path, test_size: int = 8, label: int = 3) -> None:
    folder.mkdir(parents=True)
    for prefix, count, size in (("train", 64, 8), ("t10k", 16, test_size)):
        labels = np.arange(count) % 10
        labels[3] = label
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(_idx(np.zeros((count, size, size))))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(_idx(labels))


def _write_photos(root: Path) -> None:
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (root / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (8, 8)).save(root / name / f"{number}.png")


def _mount(folder: Path, options: str) -> bool:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with all that the cases name; none of them may change it."""
    root = tmp_path_factory.mktemp("bad input, ünï code")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "conf/model/bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for name in ("good", "missing", "truncated"):
        _write_mnist(root / name)
    _write_mnist(root / "label", label=77)
    _write_mnist(root / "sizes", test_size=9)
    (root / "missing/t10k-labels-idx1-ubyte").unlink()
    with (root / "truncated/train-images-idx3-ubyte").open("r+b") as file:
        file.truncate(500)
    _write_photos(root / "empty")
    shutil.rmtree(root / "empty/train/b")
    (root / "empty/train/b").mkdir()
    _write_photos(root / "broken")
    (root / "broken/train/a/1.png").write_bytes(b"\x89PNG, or not")
    expt.run("max_steps=1", "world_size=1", f"hydra.run.dir='{root / 'trained'}'")
    mounted = [
        root / name
        for name, how in (("read_only", "ro"), ("full", "size=64k"))
        if _mount(root / name, how)
    ]
    if (root / "full") in mounted:
        _fill(root / "full")
    yield root
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _state(root: Path) -> dict[str, tuple[int, int]]:
    """Every file, with its size and when it was written, and every folder but outputs/ and those of
    its days.

    That a dataset's files were read may be remembered."""
    remembered = (root / "cache", root / "cache/checksums", *root.glob("cache/checksums/*"))
    of_all = (root / "outputs", *root.glob("outputs/*"), *remembered)
    found = [
        path for path in root.rglob("*") if path not in of_all and "__pycache__" not in path.parts
    ]
    return {
        str(path.relative_to(root)): (
            (0, 0) if path.is_dir() else (path.stat().st_size, path.stat().st_mtime_ns)
        )
        for path in found
    }


def assert_refused(done: subprocess.CompletedProcess[str], case: Bad) -> None:
    err = done.stderr
    assert (done.returncode, err.count("error: "), "Traceback" in err) == (case.code, 1, False), err
    assert case.says in err, err


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_bad_input_one_message(case: Bad, world: Path, monkeypatch: Patch, typed: Typed) -> None:
    for name in ("read_only", "full"):
        if f"={name}" in case.words and not (world / name).is_mount():
            pytest.skip("only root may mount a small disk")
    monkeypatch.chdir(world)
    monkeypatch.setenv("EXPT_CACHE", str(world / "cache"))
    before = _state(world)
    assert_refused(typed(*shlex.split(case.words)), case)
    after = _state(world)
    assert {name: after.get(name) for name in before} == before
    new = {name for name in after.keys() - before.keys() if not name.startswith(case.adds or "\0")}
    assert not new


def test_the_command_itself_says_the_same(world: Path) -> None:
    for case in (CASES["a truncated data file"], OWN):
        done = run(*shlex.split(case.words), cwd=world)
        assert (done.returncode, done.stdout) == (case.code, "")
        assert done.stderr.startswith("error: ")
        assert case.says in done.stderr
        assert "Traceback" not in done.stderr


def test_a_refused_run_leaves_a_folder_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine" / "sub").mkdir(parents=True)
    (tmp_path / "mine" / "notes.md").write_text("mine")
    done = run("batch_size=10000", "world_size=1", "hydra.run.dir=mine", cwd=tmp_path)
    assert (done.returncode, "batch_size" in done.stderr) == (2, True)
    assert {path.name for path in (tmp_path / "mine").rglob("*")} == {"notes.md", "sub"}


def test_unicode_and_spaces_do_no_harm(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    _write_mnist(tmp_path / "ünï code/data here")
    words = shlex.split(MNIST + "\"'ünï code/data here'\"")
    result = expt.run(*words, "max_steps=1", "world_size=1", "hydra.run.dir='läuft hier/ja wohl'")
    assert result.folder == tmp_path / "läuft hier/ja wohl"
    assert (result.folder / "checkpoints/last.safetensors").exists()


def _in_namespace(
    kind: str, prelude: str, *words: str, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Run `python -m expt WORDS` in a namespace of its own, after the code `prelude`."""
    program = f"import socket, subprocess, sys\n{prelude}\nfrom expt.__main__ import main\nmain()"
    unshare = ["unshare", "--map-root-user", kind]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces are not permitted here")
    command = [*unshare, sys.executable, "-c", program, *words]
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
def test_a_machine_without_a_free_port_ends_the_run_with_a_word(tmp_path: Path) -> None:
    take_all = (
        "import fcntl, struct\n"
        # SIOCSIFFLAGS, IFF_UP
        'fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 1))\n'
        'open("/proc/sys/net/ipv4/ip_local_port_range", "w").write("50000 50000")\n'
        'held = socket.create_server(("127.0.0.1", 50000))'
    )
    done = _in_namespace("--net", take_all, "epochs=1", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: 127.0.0.1: Address already in use; ")


NO_SHARED_MEMORY = (
    'subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", "/dev/shm"], check=True)'
)


@pytest.mark.slow
def test_without_dev_shm_a_run_works(tmp_path: Path) -> None:
    done = _in_namespace("--mount", NO_SHARED_MEMORY, "max_steps=2", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_without_dev_shm_processes_that_read_images_say_what_they_need(tmp_path: Path) -> None:
    _write_photos(tmp_path / "photos")
    words = (
        *shlex.split(f"{PHOTOS}photos"),
        *as_typed("dataset.cache=false dataset.num_workers=1 dataset.val_fraction=0.5"),
    )
    done = _in_namespace("--mount", NO_SHARED_MEMORY, *words, "batch_size=2", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "/dev/shm: Read-only file system" in done.stderr
    assert "dataset.num_workers=0" in done.stderr


CUSTOM = """
import torch
from torch import nn
import expt


class Rows(torch.utils.data.Dataset):
    def __init__(self, train, kind):
        self.kind = kind
        self.x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        row, odd = self.x[index], index == 5
        return {
            "no number": (row * float("nan"), row.sum()),
            "dict": ({"row": row}, row.sum()),
            "no target": {"row": row},
            "two targets": (row, row[:2]),
            "labels": (row, torch.tensor([0.0, 2.0 if odd else 1.0])),
            "class": (row.view(1, 2, 3), 7 if odd else 1),
            "lengths": (row[: 5 if odd else 6], row.sum()),
        }.get(self.kind, (row, row.sum()))


class Tokens(Rows):
    vocab_size, context = 5, 4

    def __getitem__(self, index):
        tokens, other = torch.zeros(4).long(), torch.full((4,), 9 if index == 5 else 1)
        if self.kind == "float": return tokens / 2, tokens
        return {"input": (other, tokens), "target": (tokens, other)}[self.kind]


class NoLoss(expt.Task):
    pass


class Own(expt.Task):
    def __init__(self, kind):
        self.kind, self.weight_is_samples = kind, kind == "other weight"

    def loss(self, outputs, batch):
        squares = (outputs[:, 0] - batch.targets) ** 2
        return {
            "no weight": squares.mean(),
            "no gradient": (squares.sum().detach(), len(squares)),
            "nothing": None,
            "other weight": (squares.sum(), 2.0),
        }.get(self.kind, (squares.sum(), len(squares)))

    def measure(self, outputs, batch):
        error = (outputs[:, 0] - batch.targets).abs()
        return {
            "no measure": None,
        }.get(self.kind, {"mae": (error.sum(), len(error))})


class Net(nn.Linear):
    def __init__(self, kind):
        super().__init__(6, 1)
        self.kind = kind

    def forward(self, rows):
        return {"nothing": None, "dict": {"out": rows}}.get(self.kind, super().forward(rows))


class Wide(nn.Linear):
    def __init__(self, width):
        super().__init__(6, width)
"""
YAML = {
    "dataset/rows": "_target_: bad_tasks.Rows\nkind: plain\n",
    "dataset/tokens": "_target_: bad_tasks.Tokens\nkind: plain\n",
    "task/own": "_target_: bad_tasks.Own\nkind: plain\nmetrics: {mae: min}\n",
    "task/no_loss": "_target_: bad_tasks.NoLoss\n",
    "model/wide": "_target_: bad_tasks.Wide\nwidth: 1\n",
    "model/net": "_target_: bad_tasks.Net\nkind: plain\n",
}


TABLE = "dataset=table dataset.path=t.csv dataset.targets=y "
TEXT = "task=language_model model=transformer dataset=text dataset.root="
TOKENS = "task=language_model model=transformer batch_size=8 dataset=tokens dataset.kind="
REGRESSION = "task=regression model=mlp batch_size=8 dataset=rows dataset.kind="
ROWS = "task=own model=net batch_size=8 dataset=rows dataset.kind="
TASK = "model=net batch_size=8 dataset=rows task=own task.kind="

TASKS = {
    # metrics
    "no such metric": Bad("objective=f1/val",
        "objective=f1/val: is not measured; use one of loss/train"),
    "a metric of another task": Bad(
        "task=regression dataset=diabetes objective=accuracy/val",
        "objective=accuracy/val: is not measured; use one of loss/train"
    ),
    # tables
    "texts for labels": Bad(
        f"{TABLE} task=multilabel dataset.features=[a] dataset.targets=name",
        "a label is 0 or 1: give each a column"
    ),
    "a key of an own dataset without a YAML": Bad(
        "~dataset +dataset._target_=bad_tasks.Rows +dataset.kind=plain dataset.folds=4",
        "dataset.folds=4: ",
    ),
    # texts
    "a context longer than the text": Bad(f"{TEXT}t.csv dataset.context=5000",
        "dataset.context=5000: only "),
    "a token out of range": Bad(f"{TOKENS}input",
        "sample 5: its inputs hold the token 9, expected 0 to 4 (vocab_size"),
    "tokens that are not integers": Bad(f"{TOKENS}float",
        "sample 0: its inputs are torch.float32; let them be tokens"),
    "no tokens": Bad("task=language_model model=mlp dataset=rows batch_size=8",
        "model=mlp: gives outputs for each sample, and task=language_model for each token"),
    # masks
    "masks of an unknown number of classes": Bad("task=segmentation model=unet dataset=rows",
        "task.num_classes: a custom dataset has none; give it, e.g."),
    # samples
    "images' settings for rows": Bad(f"{ROWS}plain dataset.mean=[0.5]",
        "dataset.mean, std and augment: are of images"),
    "nan in a sample": Bad(f"{ROWS}'no number'",
        "at step 1 (epoch 1) on rank 0, for inputs, column 0, of the traini"),
    "samples of unequal length": Bad(f"{ROWS}lengths", "has another shape than sample"),
    "targets that are not labels": Bad(
        "task=multilabel model=mlp batch_size=8 dataset=rows dataset.kind=labels",
        "some targets are neither 0 nor 1;"
    ),
    "a class out of range": Bad("dataset=rows dataset.kind=class dataset.num_classes=3",
        "sample 5: its label is 7, e"),
    "no targets": Bad(f"{REGRESSION}'no target'",
        "sample 0: its targets are a NoneType; let them be a tensor"),
    "two targets for one output": Bad(
        "task=regression model=net batch_size=8 dataset=rows dataset.kind='two targets'",
        "the model gives float32 [8, 1], and a batch's targets are float32 [8, 2]"
    ),
    # models
    "tokens for a named model": Bad(
        "task=language_model model=torchvision model.arch=resnet18 batch_size=8 dataset=tokens "
        "dataset.kind=input",
        "for each token; use model=transformer",
    ),
    "a model that gives nothing": Bad(
        "task=regression model=net model.kind=nothing batch_size=8 dataset=rows",
        "the model gives a NoneType, and a batch's targets"
    ),
    "an argument of another type": Bad("task=own model=wide model.width=abc dataset=rows",
        "as Wide(width='abc'): Typ"),
    # own tasks
    "a task without a loss": Bad("task=no_loss model=net dataset=rows", "abstract method"),
    "a loss without a weight": Bad(f"{TASK}'no weight'", "Own.loss is float32 []; give its sum"),
    "a loss without a gradient": Bad(f"{TASK}'no gradient'",
        "Own.loss gives a number without a gradient; compute it"),
    "no loss": Bad(f"{TASK}nothing", "Own.loss is a NoneType"),
    "a loss with an unsaid weight": Bad(f"{TASK}'other weight'",
        "Own.loss: its weights add up to 14 for 56 samples,"),
    "no sums": Bad(f"{TASK}'no measure'",
        "Own.measure gives a NoneType; return a dict of name: (sum, weight)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the cases name."""
    root = tmp_path_factory.mktemp("bad_tasks")
    (root / "bad_tasks.py").write_text(CUSTOM)
    for name, text in YAML.items():
        (root / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "conf" / f"{name}.yaml").write_text(text)
    rows = "".join(
        f"{number / 2},{'nan' if number == 7 else number},x{number},0.5\n" for number in range(60)
    )
    (root / "t.csv").write_text(f"a,b,name,y\n{rows}")
    return root


TYPED = (
    "a metric of another task", "texts for labels", "a class out of range", "nan in a sample",
    "an argument of another type", "a key of an own dataset without a YAML", "no sums",
)  # fmt: skip
ALWAYS = ("world_size=1", "log_every=7", "drop_last=false")


@pytest.mark.parametrize("name", TYPED)
def test_bad_task_one_line(name: str, tasks: Path, monkeypatch: Patch, typed: Typed) -> None:
    """Some of each kind, as they are typed."""
    monkeypatch.chdir(tasks)
    monkeypatch.syspath_prepend(tasks)
    assert_refused(typed(*shlex.split(TASKS[name].words), *ALWAYS), TASKS[name])


def _carry_out(words: Sequence[str], tasks: Path, folder: Path) -> None:
    config = parse(composed(*words, conf=tasks / "conf"), Machine(cpus=2))
    local.Launcher().carry_out(request_of(config, folder, content_of(config)))


@pytest.mark.parametrize("name", [name for name in TASKS if name not in TYPED])
def test_the_others_are_too(name: str, tasks: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """Without the command around it, as a sweep's point is composed, which takes half the time."""
    monkeypatch.chdir(tasks)
    monkeypatch.syspath_prepend(tasks)
    with pytest.raises(ExptError) as told:
        _carry_out((*shlex.split(TASKS[name].words), *ALWAYS), tasks, tmp_path / "run")
    assert (told.value.exit_code, "\n" in str(told.value)) == (2, False), told.value
    assert TASKS[name].says in str(told.value)
