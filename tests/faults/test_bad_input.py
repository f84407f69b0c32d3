"""Bad input, as a person types it: one message with key, value and mend, the right exit code, and
nothing touched."""

import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

import expt
from expt.command import main as command
from expt.launch import forkserver
from tests.facade import Capture, Patch, environment, run
from tests.faults.test_disk import _fill


class Bad(NamedTuple):
    """What is typed in the folder that `world` makes, and what comes of it."""

    words: str
    code: int
    says: str
    """In the one message on stderr, after `error: `: the key, whose explanation may change."""
    adds: tuple[str, ...] = ()
    """The only names that may be new in the folder. What was there is as it was, always."""


MNIST = "dataset=mnist dataset.download=false batch_size=8 dataset.root="
PHOTOS = "dataset=image_folder batch_size=4 dataset.root="
FAILED = ("outputs",)  # the workers had begun: the record of a run that failed stays

CASES = {
    # data
    "a missing data file": Bad(f"{MNIST}missing", 2,
        "t10k-labels-idx1-ubyte (plain or .gz) not found in missing/"),
    "a truncated data file": Bad(f"{MNIST}truncated", 2,
        "holds 500 bytes, and its shape (64, 8, 8) makes 4112; delete it"),
    "test images of another size": Bad(f"{MNIST}sizes", 2, "dataset.root=sizes: "),
    "a label out of range": Bad(f"{MNIST}label", 2,
        "label/train-labels-idx1-ubyte holds the label 77, expected 0 to"),
    "no folder of images": Bad(f"{PHOTOS}nowhere", 2, "dataset.root=nowhere: "),
    "an empty class folder": Bad(f"{PHOTOS}empty", 2,
        "no images in the class folder empty/train/b; add some, or"),
    "an unreadable image": Bad(f"{PHOTOS}broken", 2,
        "broken/train/a/1.png cannot be read as an image", ("cache",)),
    "fewer images than a batch": Bad(
        f"{MNIST}good batch_size=1000", 2,
        "fewer than batch_size=1000; use batch_size=58, or drop_last=false", FAILED
    ),
    # checkpoints and folders
    "a checkpoint of another model": Bad("resume=trained model=convnet", 2, "model=convnet: "),
    "no checkpoint there": Bad("resume=nowhere", 2, "resume=nowhere: "),
    "a folder without checkpoints": Bad("resume=good", 2, "resume=good: "),
    "to go on nowhere": Bad("resume=auto", 2, "resume=auto: "),
    "a run folder that exists": Bad("hydra.run.dir=trained", 2, "hydra.run.dir=trained: "),
    "a run folder that is a file": Bad("hydra.run.dir=file", 2, "hydra.run.dir=file: "),
    "a sweep folder in a file": Bad("-m seed=0,1 hydra.sweep.dir=file/x", 2,
        "hydra.sweep.dir=file/x: "),
    "a read-only folder": Bad("hydra.run.dir=read_only/x", 2, "hydra.run.dir=read_only/x: "),
    "a full disk": Bad("hydra.run.dir=full/x", 1, "full/x: ", ("full/x",)),
    # YAML
    "YAML with a wrong type": Bad("--config-dir conf model=type", 2, "model.hidden=3: "),
    "YAML with a tab": Bad("--config-dir conf model=tab", 2, "tab.yaml\", line 2, column 1"),
    "YAML that is not text": Bad("--config-dir conf model=bytes", 2, "conf: "),
    "YAML that names a file that is not there": Bad("--config-dir conf model=asks", 2,
        "model=nothere: "),
    "YAML with an unset variable": Bad("--config-dir conf model=env", 2, "model.hidden: "),
    "no folder of YAML": Bad("--config-dir nowhere", 2, "--config-dir nowhere: "),
    # words
    "a target that is no model": Bad("'model={_target_: os.system, command: touch called}'", 2,
        "_target_=os.system: "),
    "a wrong key": Bad("bakend=gloo", 2, "bakend=gloo: "),
    "a key of another dataset": Bad("dataset.num_workers=2", 2,
        "dataset=digits has no key 'dataset.num_workers'"),
    "a key of the launcher": Bad("-m seed=0,1 hydra.launcher.retries=x", 2,
        "hydra.launcher.retries=x: "),
    "no key": Bad("=3", 2, "=3: "),
    "a number for a group": Bad("model=3", 2, "model=3: "),
    "a plan that is all warm-up": Bad(
        "scheduler=cosine scheduler.epochs=1 scheduler.warmup_epochs=2", 2, "scheduler.epochs=1: "),
    "a value with spaces, quoted once": Bad(f"{MNIST}'ünï code'", 2,
        "(plain or .gz) not found in ünï code/"),
}  # fmt: skip
OWN = Bad("--config-dir conf dataset=label", 2, "sample 5: ", FAILED)
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
    expt.run("max_steps=1", f"hydra.run.dir='{root / 'trained'}'")
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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_bad_input_one_message(case: Bad, world: Path, monkeypatch: Patch, capsys: Capture) -> None:
    for name in ("read_only", "full"):
        if f"={name}" in case.words and not (world / name).is_mount():
            pytest.skip("only root may mount a small disk")
    monkeypatch.chdir(world)
    monkeypatch.setenv("EXPT_CACHE", str(world / "cache"))
    monkeypatch.setattr(sys, "argv", ["expt", *shlex.split(case.words)])
    monkeypatch.setattr(forkserver, "kill", lambda: None)  # this session's is used again
    before = _state(world)
    with pytest.raises(SystemExit) as ended:
        command.main(sys.argv[1:])
    err = capsys.readouterr().err
    assert (ended.value.code, err.count("error: "), "Traceback" in err) == (case.code, 1, False), (
        err
    )
    assert case.says in err, err
    after = _state(world)
    assert {name: after.get(name) for name in before} == before
    new = {name for name in after.keys() - before.keys() if not name.startswith(case.adds or "\0")}
    assert not new


def test_the_command_itself_says_the_same(world: Path) -> None:
    for case in (CASES["a wrong key"], CASES["a truncated data file"], OWN):
        done = run(*shlex.split(case.words), cwd=world)
        assert (done.returncode, done.stdout) == (case.code, "")
        assert done.stderr.startswith("error: ")
        assert case.says in done.stderr
        assert "Traceback" not in done.stderr


def test_unicode_and_spaces_do_no_harm(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    _write_mnist(tmp_path / "ünï code/data here")
    words = shlex.split(MNIST + "\"'ünï code/data here'\"")
    result = expt.run(*words, "max_steps=1", "hydra.run.dir='läuft hier/ja wohl'")
    assert result.folder == tmp_path / "läuft hier/ja wohl"
    assert (result.folder / "checkpoints/last.safetensors").exists()


def _in_namespace(
    kind: str, prelude: str, *words: str, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """`python -m expt WORDS` in a namespace of its own, in which the code `prelude` has been
    run."""
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
        "dataset.cache=false",
        "dataset.num_workers=1",
        "dataset.val_fraction=0.5",
    )
    done = _in_namespace("--mount", NO_SHARED_MEMORY, *words, "batch_size=2", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "/dev/shm: Read-only file system" in done.stderr
    assert "dataset.num_workers=0" in done.stderr
