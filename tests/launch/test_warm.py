"""`expt warm`: what is typed next starts from it, to the same numbers; never from one that is stale
or another's.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

import expt
from expt.command.conf_files import conf_dir
from expt.launch import surroundings, warm
from expt.launch.warm_server import Imported
from tests.conftest import RunFolder, alive, environment, run
from tests.faults.running import ranks, wait_until, working_in
from tests.launch.warmed import SMALL, Warm

PACKAGES = "site-packages"


def test_a_command_uses_it_and_leaves_nothing_behind(server: Warm, tmp_path: Path) -> None:
    warm_run: RunFolder = server.used_by(lambda folder: server.run(cwd=folder), tmp_path)
    (tmp_path / "cold").mkdir()
    run(*SMALL, "hydra.run.dir=run", cwd=tmp_path / "cold")
    assert warm_run.points == RunFolder(tmp_path / "cold" / "run").points != []
    wait_until(lambda: not working_in(tmp_path))
    wait_until(lambda: not alive(server.forkservers))


def test_a_sweep_uses_it_once_and_workers_have_the_commands_variables(
    server: Warm, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self, channels, image_size, num_classes):\n"
        "        super().__init__(channels * image_size[0] * image_size[1], num_classes)\n"
        "        print('sees', os.environ['TERM'], os.getcwd(), oct(os.umask(0o22)), flush=True)\n"
        "    def forward(self, images):\n"
        "        return super().forward(images.flatten(1))\n"
    )
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("_target_: mine.Net\n")
    words = (
        "-m",
        *SMALL,
        "seed=0,1",
        "model=mine",
        "--config-dir",
        "../conf",
        "hydra.sweep.dir=sweep",
        "world_size=1",
    )

    def sweep(folder: Path) -> Path:
        shutil.copy(tmp_path / "mine.py", folder)
        done = run(*words, cwd=folder, TERM="of-here", **server.runtime)
        assert done.returncode == 0, done.stderr
        return folder

    folder = server.used_by(sweep, tmp_path)
    logs = [path.read_text() for path in folder.glob("sweep/*/logs/0/0/stdout.log")]
    assert len(logs) == 2
    assert all(f"sees of-here {folder} 0o22\n" in log for log in logs)


def _fingerprint(
    env: Mapping[str, str] | None = None,
    *,
    prefix: Sequence[str] = (),
    options: Sequence[str] = (),
    cwd: Path | None = None,
) -> str:
    """That of a Python which is started so."""
    program = "from expt.launch.surroundings import fingerprint; print(fingerprint())"
    command = [*prefix, sys.executable, *options, "-c", program]
    here = {**environment(), **(env or {})}
    return subprocess.run(
        command, env=here, cwd=cwd, check=True, capture_output=True, text=True
    ).stdout


@functools.cache
def _ours() -> str:
    """That of a Python which is started as the others are."""
    return _fingerprint()


@pytest.mark.parametrize(
    ("prefix", "options", "env"),
    [
        ((), (), {"OMP_NUM_THREADS": "3"}),
        ((), (), {"HOME": "/nowhere"}),
        (("taskset", "-c", "0"), (), {}),
        (("prlimit", "--nofile=900"), (), {}),
        (("nice", "-n", "3"), (), {}),
        (("sh", "-c", 'umask 027; exec "$@"', "sh"), (), {}),
        (("sh", "-c", 'trap "" TERM; exec "$@"', "sh"), (), {}),
        (("setpriv", "--no-new-privs"), (), {}),
        (("unshare", "--mount"), (), {}),
        (("ionice", "-c", "3"), (), {}),
        (("sh", "-c", 'echo 0x3f > /proc/self/coredump_filter; exec "$@"', "sh"), (), {}),
        ((), ("-X", "utf8"), {}),
        ((), ("-O",), {}),
    ],
    ids=[
        "variable",
        "home",
        "cores",
        "ulimit",
        "nice",
        "umask",
        "signals",
        "rights",
        "mounts",
        "disk",
        "core dumps",
        "option",
        "-O",
    ],
)
def test_what_a_process_inherits_tells_it_apart(
    prefix: tuple[str, ...], options: tuple[str, ...], env: dict[str, str]
) -> None:
    if prefix and subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"{prefix[0]} is not there, or not allowed")
    if prefix[:1] == ("taskset",) and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    assert _fingerprint(env, prefix=prefix, options=options) != _ours()


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names a system call by its number")
@pytest.mark.parametrize(
    ("call", "changed"),
    [
        ("238, 3, ctypes.byref(ctypes.c_ulong(1)), 64", "memory policy"),
        ("157, 41, 1, 0, 0, 0", "status"),
    ],
)
def test_where_memory_is_taken_tells_it_apart(call: str, changed: str) -> None:
    """As by `numactl --interleave`, and where huge pages are forbidden."""
    program = (
        "import ctypes, sys; from expt.launch import surroundings; before ="
        f" surroundings._process()\nsys.exit('not allowed') if ctypes.CDLL(None).syscall({call})"
        " else None\nprint([key for key, value in surroundings._process().items() if value !="
        " before[key]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        check=False,
        capture_output=True,
        text=True,
    )
    if "not allowed" in done.stderr:
        pytest.skip("not allowed here")
    assert done.stdout == f"['{changed}']\n"


def test_a_system_call_whose_number_is_not_known_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for numbers in "_GET_MEMPOLICY", "_IOPRIO_GET":
        monkeypatch.setattr(surroundings, numbers, {})
    found = surroundings._process()
    assert (found["memory policy"], found["disk priority"]) == (None, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_user_tells_it_apart() -> None:
    program = (
        "import os; from expt.launch import surroundings; before = surroundings._status();"
        " os.setuid(65534)\nprint(*(key for key, value in surroundings._status().items() if value"
        " != before[key]))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
    assert "Uid" in done.stdout.split()


def test_another_virtual_environment_tells_it_apart(tmp_path: Path) -> None:
    folder = tmp_path / "env"
    venv.create(folder, symlinks=True)
    program = "from expt.launch.surroundings import fingerprint; print(fingerprint())"
    env = environment(PYTHONPATH=str(Path(expt.__file__).parents[1]))
    here, there, same = (
        subprocess.run(
            [python, "-c", program], env=env, check=True, capture_output=True, text=True
        ).stdout
        for python in (sys.executable, folder / "bin" / "python", folder / "bin" / "python3")
    )
    assert here != there
    assert there == same, "by another name"


def test_status_says_what_differs(server: Warm, tmp_path: Path) -> None:
    done = run("warm", "--status", cwd=tmp_path, OMP_NUM_THREADS="7", **server.runtime)
    assert "not used by commands typed here: variable OMP_NUM_THREADS differs" in done.stdout


def test_where_a_person_sits_does_not(tmp_path: Path) -> None:
    there = {
        "TERM": "vt100",
        "PWD": str(tmp_path),
        "SSH_TTY": "/dev/pts/9",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    assert _fingerprint(there, cwd=tmp_path) == _ours()
    deaf = (
        "sh",
        "-c",
        'trap "" HUP INT QUIT; exec "$@"',
        "sh",
    )  # as nohup has it, and `&` in a script
    assert _fingerprint(prefix=deaf) == _ours()


def test_an_edited_file_of_expt_tells_it_apart(tmp_path: Path) -> None:
    shutil.copytree(
        Path(expt.__file__).parent, tmp_path / "expt", ignore=shutil.ignore_patterns("__pycache__")
    )
    here = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    file = tmp_path / "expt" / "training" / "loop.py"
    found = [_ours(), _fingerprint(here, cwd=tmp_path)]
    added = file.with_name("added.py")
    changes: list[Callable[[], object]] = [lambda: os.utime(file, (1, 1)), added.touch, file.unlink]
    for change in changes:
        change()
        found.append(_fingerprint(here, cwd=tmp_path))
    assert len({*found}) == 5, "another copy; touched, new and gone"


def test_torchs_files_and_the_packages_folder_are_looked_at() -> None:
    found = surroundings._python()
    names = [Path(path).name for path, _, _ in found["torch"]]
    assert {"site-packages", "version.py", "lib"} <= {*names}
    assert found["packages"]


def test_a_command_with_another_variable_starts_its_own(server: Warm, tmp_path: Path) -> None:
    used = server.num_used
    assert server.run(cwd=tmp_path, OMP_NUM_THREADS="1").result["status"] == "completed"
    assert server.num_used == used


@pytest.mark.slow
@pytest.mark.parametrize("other", ["cores", "ulimit", "user", "virtual environment"])
def test_a_command_in_other_surroundings_starts_its_own(
    server: Warm, tmp_path: Path, other: str
) -> None:
    """Typed, and without a word; what is typed then as the server was is forked from it again."""
    before = {"cores": ("taskset", "-c", "0"), "ulimit": ("prlimit", "--nofile=900")}.get(other, ())
    program, more = sys.executable, dict[str, str]()
    if other == "user":
        if os.geteuid():
            pytest.skip("needs root")
        before = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        more = {"HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
        version = subprocess.run(
            [*before, sys.executable, "-VV"], capture_output=True, text=True, check=False
        ).stdout
        if version.strip() != f"Python {sys.version}":
            pytest.skip("this Python is not for other users")
    if other == "virtual environment":
        program = str(_environment_like_ours(tmp_path / "env"))
    with tempfile.TemporaryDirectory() as name:  # that another user can enter, too
        folder = Path(name)
        folder.chmod(0o777)
        used = server.num_used
        command = [*before, program, "-m", "expt", *SMALL, "hydra.run.dir=run"]
        env = environment(**server.runtime, **more)
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert RunFolder(folder / "run").result["status"] == "completed"
        assert server.num_used == used
    server.used_by(lambda folder: server.run(cwd=folder), tmp_path)


@pytest.mark.slow
def test_what_is_typed_after_an_upgrade_starts_its_own(tmp_path: Path) -> None:
    """Of a copy of expt, for other tests use the files of this one."""
    root, package = tmp_path / "root", Path(expt.__file__).parent
    for folder in package, conf_dir(), package.parent / "hydra_plugins":
        shutil.copytree(folder, root / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "runtime").mkdir(mode=0o700)
    python = _environment(
        tmp_path / "env", [str(root), *(path for path in sys.path if path.endswith(PACKAGES))]
    )
    env = environment(XDG_RUNTIME_DIR=str(tmp_path / "runtime"))

    def typed(*words: str) -> str:
        command = [str(python), "-m", "expt", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    typed("warm", "--for", "2h")
    for number in range(5):  # a command waits 0.2 s for it, on a busy machine too
        typed(*SMALL, f"hydra.run.dir=before-{number}")
        if "by 1 commands" in typed("warm", "--status"):
            break
    (root / "expt" / "report.py").touch()
    typed(*SMALL, "hydra.run.dir=after")
    status = typed("warm", "--status")
    assert "by 1 commands" in status
    assert "expt differs; `expt warm` starts one" in status
    typed("warm", "--stop")


def _environment_like_ours(folder: Path) -> Path:
    """The Python of another virtual environment, which has what ours has."""
    return _environment(
        folder, [f"import site; site.addsitedir({p!r})" for p in sys.path if p.endswith(PACKAGES)]
    )


def _environment(folder: Path, lines: Sequence[str]) -> Path:
    """The Python of a virtual environment with these lines in a .pth."""
    venv.create(folder, symlinks=True)
    (next(folder.glob(f"lib/python*/{PACKAGES}")) / "ours.pth").write_text("\n".join(lines))
    return folder / "bin" / "python"


@pytest.mark.parametrize(
    "why", ["slurm", "module of that name", "module on its path", "others can enter"]
)
def test_it_forks_for_none_but_its_like(server: Warm, tmp_path: Path, why: str) -> None:
    env = {"SLURM_JOB_ID": "1"} if why == "slurm" else {}
    if why == "module of that name":
        (tmp_path / "tensorboard.py").write_text("")
    if why == "module on its path":  # a script may put a folder there itself
        (tmp_path / "lib" / "numpy").mkdir(parents=True)
        (tmp_path / "lib" / "numpy" / "__init__.py").touch()
    if why == "others can enter":
        server.folder.chmod(0o711)
    try:
        with pytest.raises(warm.Cold):
            _fork(server, tmp_path, path="lib" if why == "module on its path" else "other", **env)
    finally:
        server.folder.chmod(0o700)


def _fork(server: Warm, cwd: Path, *, path: str = "other", **env: str) -> float:
    """Ask it from a process like its own; returns how long that took. Raises Cold."""
    code = (
        f"import os, sys, time; sys.path.insert(0, {path!r}); from expt.launch import warm\n"
        "began = time.monotonic()\n"
        "try:\n"
        "    print(warm.fork('pass', []) and 'forked', end=' ')\n"
        "except warm.Cold:\n"
        "    print('cold', end=' ')\n"
        "print(time.monotonic() - began)\n"
    )
    command = [sys.executable, "-c", code]
    said = subprocess.run(
        command,
        cwd=cwd,
        env=environment(**server.runtime, **env),
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    if said[0] == "cold":
        raise warm.Cold(said[1])
    return float(said[1])


def test_an_edited_file_of_what_is_imported_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own_library.py"
    file.write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("own_library")
    imported = Imported(time.time_ns())
    assert not imported.is_stale()
    path = [str(tmp_path), *sys.path]
    assert not imported.is_shadowed(path, tmp_path / "nowhere")
    assert imported.is_shadowed(path[::-1], tmp_path / "nowhere"), "another order"
    file.write_text("x = 22")
    assert imported.is_stale()
    assert Imported(0).is_stale(), "edited while it was imported, maybe"


def test_what_appears_later_in_a_folder_of_the_path_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = tmp_path / "first", tmp_path / "last"
    monkeypatch.setattr(sys, "path", [str(first), *sys.path, str(last)])
    imported, nowhere = Imported(time.time_ns()), tmp_path / "nowhere"
    assert not imported.is_shadowed(sys.path, nowhere)
    for folder in first, last:
        folder.mkdir()
        (folder / "__main__.py").touch()
        (folder / "own_module.py").touch()
    (last / "pytest.py").touch()
    assert not imported.is_shadowed(sys.path, nowhere), "the one in use comes before it"
    (first / "pytest.py").touch()
    assert imported.is_shadowed(sys.path, nowhere)


def test_an_archive_on_the_path_that_changes_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (archive := tmp_path / "some.zip").touch()
    monkeypatch.setattr(sys, "path", [str(archive), *sys.path])
    imported = Imported(time.time_ns())
    assert not imported.is_shadowed(sys.path, tmp_path / "nowhere")
    archive.write_text("another")
    assert imported.is_stale()


@pytest.mark.slow
def test_one_that_hangs_or_was_killed_costs_little(tmp_path: Path) -> None:
    own = Warm(tmp_path / "runtime")
    own.command("--for", "2h")
    pid = own.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(warm.Cold) as hung:
        _fork(own, tmp_path)
    assert 0.1 < float(str(hung.value)) < 1, "0.2 s, on a machine that is not busy"
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive({pid}))
    with pytest.raises(warm.Cold):
        _fork(own, tmp_path)
    assert own.run(cwd=tmp_path).result["status"] == "completed"
    assert own.command("--status") == "there is none; `expt warm` starts one\n"
    assert not [*own.folder.glob("*.socket")]


@pytest.mark.slow
def test_one_that_hangs_is_told_and_stopped(tmp_path: Path) -> None:
    own = Warm(tmp_path / "runtime")
    own.command("--for", "2h")
    pids = {own.pid, own.drivers}
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    assert re.search("does not answer .*; `expt warm --stop` ends it", own.command("--status"))
    assert own.command("--stop") == "ended 1\n"
    wait_until(lambda: not alive(pids))


@pytest.mark.slow
def test_one_whose_second_process_is_stopped_ends_whole(tmp_path: Path) -> None:
    own = Warm(tmp_path / "runtime")
    own.command("--for", "2h")
    pids = {own.pid, own.drivers}
    assert "stopped" not in own.command("--status")
    os.kill(own.drivers, signal.SIGSTOP)
    assert f"stopped process {own.drivers}, in which commands begin" in own.command("--status")
    assert own.command("--stop") == "ended 1\n"
    wait_until(lambda: not alive(pids))


@pytest.mark.slow
def test_it_ends_when_it_was_not_used_and_not_while_it_is(tmp_path: Path) -> None:
    own = Warm(tmp_path / "runtime")
    own.command("--for", "2h")
    process, workers = own.training(tmp_path)
    pid = own.pid
    assert workers & own.forkservers, "else it would end at once"
    assert f"process {pid}," in own.command("--for", "1s"), "the same one, with another time"
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    wait_until(lambda: not alive({pid, *workers}))
    assert own.command("--status") == "there is none; `expt warm` starts one\n"
    assert own.command("--stop") == "there was none\n"


@pytest.mark.slow
def test_runs_under_way_outlive_it(tmp_path: Path) -> None:
    own = Warm(tmp_path / "runtime")
    own.command()
    process, workers = own.training(tmp_path)
    pid = own.pid
    assert own.command("--stop") == "ended 1\n"
    wait_until(lambda: not alive({pid}))
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    wait_until(lambda: not alive(workers))


def test_ctrl_c_saves_and_ends_its_workers(server: Warm, tmp_path: Path) -> None:
    process, workers = server.training(tmp_path)
    assert len(ranks(workers)) == 2
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    [record] = tmp_path.glob("*/here/result.json")
    assert json.loads(record.read_text())["status"] == "interrupted"
    wait_until(lambda: not alive(workers))


@pytest.mark.slow
def test_a_killed_driver_leaves_no_worker(server: Warm, tmp_path: Path) -> None:
    process, workers = server.training(tmp_path)
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not alive(workers))
    assert server.pid


@pytest.mark.slow
@pytest.mark.parametrize("who", ["worker", "forkserver"])
def test_a_killed_process_fails_the_run_in_words(server: Warm, tmp_path: Path, who: str) -> None:
    process, workers = server.training(tmp_path)
    [forkserver] = workers & server.forkservers
    os.kill(ranks(workers)[1] if who == "worker" else forkserver, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "killed" in err
    assert "Traceback" not in err
    wait_until(lambda: not alive(workers))


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (
            ("--for", "soon"),
            {},
            "--for soon: is no length of time; write it as in --for 90s, --for 30m or --for 2h",
        ),
        (("--for", "0m"), {}, "--for 0m: is no length"),
        (("now",), {}, "unrecognized arguments: now; see python -m expt warm --help"),
        ((), {"SLURM_JOB_ID": "1"}, "expt warm: not in a job of Slurm"),
    ],
)
def test_what_it_does_not_understand_is_refused(
    tmp_path: Path, words: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    done = run("warm", *words, cwd=tmp_path, XDG_RUNTIME_DIR=str(tmp_path), **env)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize("what", ["open", "file"])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, what: str) -> None:
    tmp_path.chmod(0o700)
    if what == "open":
        (tmp_path / "expt").mkdir(mode=0o755)
    else:
        (tmp_path / "expt").touch()
    done = run("warm", cwd=tmp_path, XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 2
    assert "must be a folder of yours that nobody else can enter" in done.stderr


def test_one_that_ends_before_it_is_stopped_is_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "expt").mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    path = tmp_path / "expt" / "0.socket"

    def answer_once() -> None:
        asked, _ = listener.accept()
        with asked:
            asked.recv(warm.MAX_BYTES)
            path.unlink()
            listener.close()
            asked.send(b"{}")

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("expt/0.socket")  # a socket's path is 108 bytes at most
        listener.listen()
        ends = threading.Thread(target=answer_once)
        ends.start()
        done = run("warm", "--stop", cwd=tmp_path, XDG_RUNTIME_DIR=str(tmp_path))
        ends.join()
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended 1\n", "")
