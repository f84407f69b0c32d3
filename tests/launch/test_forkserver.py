"""The forkserver and what is forked from it, in a Python of its own, without torch."""

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from expt.launch import forkserver
from tests.facade import Capture, as_typed, children_of, environment

ALONE = """
import os, signal, socket, sys, time
from pathlib import Path
from expt.errors import RunFailed
from expt.launch import forkserver, processes
forkserver.WORKER_MODULES = ()  # nothing that takes long

def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

def until(true):
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)

def title(pid):
    return open(f"/proc/{pid}/cmdline").read().rstrip(chr(0))

def server():
    sleeper = start("time:sleep", 60)
    return int(open(f"/proc/{sleeper.pid}/stat").read().rpartition(")")[2].split()[1])

def start(function, *arguments, env={}, **more):
    work = forkserver.Work(function, arguments, env, Path("out"), Path("err"), **more)
    return processes.start(work)
"""

DOES = """
import os, socket, sys, threading

def tell(kept, met):
    size, port = os.fstat(kept.descriptor).st_size, met.getsockname()[1]
    print(os.environ["WORD"], oct(os.umask(0)), size, port)
    print(os.getcwd() == sys.argv[1], sys.path[-1], os.environ.get("GONE"))
    if os.fork() == 0:
        try:
            os.fstat(kept.descriptor)
        except OSError:
            print("closed in its child", flush=True)
        os._exit(0)
    os.wait()

def linger(fifo):
    threading.Thread(target=lambda: open(fifo).read()).start()  # Python waits for it as it ends

def leave_one(fifo):
    if os.fork() == 0:
        open(fifo).read()
        os._exit(0)

def fail():
    raise ValueError("no good")

def refuse_a_second():
    fork, asked = os.fork, []
    def limited():
        asked.append(1)
        if len(asked) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()
    os.fork = limited

def reads():
    print(os.read(0, 9), os.readlink("/proc/self/fd/0"))
"""


def started(code: str, folder: Path) -> subprocess.Popen[str]:
    (folder / "does.py").write_text(DOES)
    (folder / "script.py").write_text(ALONE + textwrap.dedent(code))
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    words = [sys.executable, str(folder / "script.py")]
    return subprocess.Popen(words, env=environment(), cwd=folder, text=True, **pipes)


def python(code: str, cwd: Path, typed: str = "") -> list[str]:
    """Return what the code prints, line by line."""
    process = started(textwrap.dedent(code) + "\nforkserver.kill()\n", cwd)
    out, err = process.communicate(typed, timeout=60)
    assert process.returncode == 0, err
    return out.splitlines()


def test_one_forkserver_in_its_own_session_until_killed(tmp_path: Path) -> None:
    code = """
        forkserver.kill()  # there is none yet: no harm
        forkserver.warm()
        first = server()
        forkserver.warm(["json"])
        print(server() == first, os.getsid(first) == first, title(first).split(" of ")[0])
        if (child := os.fork()) == 0:
            time.sleep(60)
        forkserver.kill()
        print(alive(first))
        os.kill(child, signal.SIGKILL)
        print(alive(server()))
    """
    found = python(code, tmp_path)
    assert found == ["True True expt forkserver", "False", "True"]


def test_a_process_has_what_it_is_given_and_the_drivers_surroundings(tmp_path: Path) -> None:
    (tmp_path / "five").write_text("12345")
    (tmp_path / "later").mkdir()
    code = """
        os.environ["GONE"] = "1"
        os.umask(0)
        forkserver.warm()
        server()
        listener = socket.create_server(("127.0.0.1", 0))
        kept = forkserver.Kept(os.open("five", os.O_RDONLY))
        os.umask(0o027)
        os.chdir("later")
        del os.environ["GONE"]
        sys.path.append("later")
        sys.argv[1:] = [os.getcwd()]
        more = {"env": {"WORD": "hello"}, "kept": [kept], "title": "expt me"}
        work = start("does:tell", kept, listener, **more)
        until(lambda: work.exitcode is not None)
        print(work.exitcode, listener.getsockname()[1])
        print(*(oct(os.stat(name).st_mode & 0o777) for name in ("out", "err")))
        print(open("out").read(), open("err").read())
    """
    code, modes, *out = python(code, tmp_path)
    port = code.split()[1]
    assert (code.split()[0], modes) == ("93", "0o640 0o640")
    assert out == [f"hello 0o27 5 {port}", "True later None", "closed in its child", " "]


def test_what_is_typed_for_the_command_is_left_to_it(tmp_path: Path) -> None:
    code = """
        start("does:reads").result()
        print(open("out").read(), end="")
        print(sys.stdin.read())
    """
    assert python(code, tmp_path, typed="typed") == ["b'' /dev/null", "typed"]


def test_one_is_finished_before_it_is_gone_unless_it_frees_something(tmp_path: Path) -> None:
    code = """
        os.mkfifo("one"), os.mkfifo("two")
        early, late = start("does:linger", "one"), start("does:linger", "two", frees_at_end=True)
        print(early.result(), early.exitcode, early.is_gone, late.exitcode, title(early.pid))
        early.close()
        for fifo in "one", "two":
            open(fifo, "w").close()
        processes.wait_for_leaving()
        until(lambda: late.exitcode is not None)
        print(alive(early.pid), late.exitcode, late.is_gone)
        orphan = start("does:leave_one", "one")  # who is left behind holds up nobody
        until(lambda: orphan.is_gone)
        print(orphan.exitcode)
        open("one", "w").close()
    """
    assert python(code, tmp_path) == ["None 93 False None expt worker", "False 93 True", "93"]


def test_many_one_after_another_take_no_more_descriptors_than_a_few(tmp_path: Path) -> None:
    code = """
        os.mkfifo("one")
        held = []
        for _ in range(8):
            early = start("does:linger", "one")
            early.result()
            early.close()  # before it is gone
            held.append(len(os.listdir("/proc/self/fd")))
            open("one", "w").close()
            until(lambda: early.is_gone)
        print(held[-1] - held[0])
    """
    assert python(code, tmp_path) == ["0"]


def test_how_one_ends_is_known(tmp_path: Path) -> None:
    code = """
        def ended(*what):
            process = start(*what)
            until(lambda: process.is_gone)
            return process.exitcode
        exits = ended("sys:exit", 3), ended("sys:exit", "no")
        print(ended("os:_exit", 0), *exits, ended("does:fail"))
        print("ValueError: no good" in open("err").read())
        sleeper = start("time:sleep", 60)
        print(sleeper.exitcode)
        processes.ask([sleeper], signal.SIGTERM)
        processes.wait_for_all([sleeper], 30, until_gone=True)
        print(sleeper.exitcode)
        processes.ask([sleeper], signal.SIGTERM)  # gone: no harm
        for what in ([(9,)], [("no",), (9,)]):
            try:
                print(processes.call_each("math:sqrt", what))
            except TypeError as error:
                print(error)
    """
    expected = ["0 3 1 1", "True", "None", "-15", "[3.0]", "must be real number, not str"]
    assert python(code, tmp_path) == expected


def test_one_that_cannot_be_forked_fails_alone(tmp_path: Path) -> None:
    code = """
        forkserver.WORKER_MODULES = ("does:refuse_a_second",)
        sleeper = start("time:sleep", 60)
        try:
            start("math:sqrt", 9)
        except RunFailed as error:
            print("ulimit" in str(error))
        print(processes.call_each("math:sqrt", [(9,)]), sleeper.exitcode)
    """
    assert python(code, tmp_path) == ["True", "[3.0] None"]


@pytest.mark.parametrize("free", [9, 10])
def test_one_without_room_for_open_files_fails_alone(free: int, tmp_path: Path) -> None:
    code = f"""
        import resource
        forkserver.warm()
        first = processes.call_each("os:getppid", [()])[0]
        limit = len(os.listdir(f"/proc/{{first}}/fd")) + {free}
        _, most = resource.prlimit(first, resource.RLIMIT_NOFILE)
        resource.prlimit(first, resource.RLIMIT_NOFILE, (limit, most))
        sleepers = []
        try:
            while len(sleepers) < 10:
                sleepers.append(start("time:sleep", 60))
        except RunFailed as error:
            print("ulimit -n" in str(error))
        print({{each.exitcode for each in sleepers}}, len(sleepers) > 2)
        processes.kill(sleepers[:1])
        print(processes.call_each("os:getppid", [()]) == [first])
    """
    assert python(code, tmp_path) == ["True", "{None} True", "True"]


def test_a_driver_may_ignore_its_children_and_have_many_files_open(tmp_path: Path) -> None:
    code = """
        import resource
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, most))
        held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        for code in (3, 4):
            process = start("sys:exit", code)
            until(lambda: process.is_gone)
            print(process.exitcode)
    """
    assert python(code, tmp_path) == ["3", "4"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_driver_alone(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
        heard, real = [], forkserver.launch
        def launch(*arguments):
            os.kill(os.getpid(), {number:d})
            heard.append("started")
            return real(*arguments)
        forkserver.launch = launch
        signal.signal({number:d}, lambda *_: heard.append("asked"))
        forkserver.warm()
        status = open(f"/proc/{{server()}}/status")
        ignored = next(line for line in status if line.startswith("SigIgn"))
        print(*heard, bool(int(ignored.split()[1], 16) & 1 << {number:d} - 1))
    """
    assert python(code, tmp_path) == ["started asked True"]


def test_what_a_command_names_is_imported_for_all_its_workers(tmp_path: Path) -> None:
    words = [
        *as_typed("-m model=mlp,timm +task.metrics.auroc._target_=torchmetrics.AUROC"),
        "dataset.root=a/mytimmy",
    ]
    assert forkserver.libraries_in(words) == ["timm", "torchmetrics"]
    assert forkserver.libraries_in(["model=mlp", "strategy=ddp"]) == []
    tuned = as_typed("model=mlp,transformers model.path=a/mlp model.lora.rank=8")
    assert forkserver.libraries_in(tuned) == ["expt.launch.preload:for_transformers", "peft"]
    assert forkserver.libraries_in(["dataset.root=transformers", "model=transformer"]) == []
    for word in ("strategy=fsdp", "strategy=ddp,hsdp"):
        assert forkserver.libraries_in(["model=mlp", word]) == ["expt.launch.preload:for_sharding"]
    code = """
        forkserver.warm(["colorsys", "no_such_library"])
        start("builtins:exec", "import sys; print('colorsys' in sys.modules)").result()
        print(open("out").read())
    """
    assert python(code, tmp_path)[0] == "True"


@pytest.mark.slow
def test_no_import_waits_for_the_thread_that_loads_torch() -> None:
    code = """
        import sys, threading
        waited = []
        def note(event, arguments):
            if event == "import" and arguments[1] and threading.active_count() > 1:
                waited.append(arguments[0])
        sys.addaudithook(note)
        from expt.launch import preload
        preload.for_all()
        print(waited)
    """
    program = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(program, check=True, capture_output=True, text=True, env=environment())
    assert done.stdout == "[]\n"


def test_one_that_dies_of_its_imports_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os; os.kill(os.getpid(), 9)\n")
    code = """
        from expt.errors import RunFailed
        forkserver.warm(["deadly"])
        try:
            start("os:getpid")
        except RunFailed as error:
            print(error)
    """
    assert python(code, tmp_path) == [
        "the process that all workers are forked from was killed (out of memory?), 3 times"
    ]


IMPORTS = "from pathlib import Path; Path('imports').touch(); import time; time.sleep(60)\n"
HOLDS_LOCK = "import ctypes; ctypes.PyDLL(None).sleep(60)\n"  # no Python runs meanwhile


@pytest.mark.parametrize(
    "how", [IMPORTS, IMPORTS.partition("; import time")[0] + "; " + HOLDS_LOCK]
)
@pytest.mark.parametrize("stopped", [False, True])
def test_forkserver_dies_with_importing_driver(tmp_path: Path, how: str, stopped: bool) -> None:
    (tmp_path / "slow.py").write_text(how)
    with driver(tmp_path, 'forkserver.warm(["slow"]); until(Path("imports").exists)') as process:
        (child,) = children_of(process.pid)
        gone_with(process, {child}, stopped=stopped)


LEAKS = """
import os, time
from expt import signals

class Leak:  # as nanobind would say, in a terminal that has its prompt again, what was not freed
    def __del__(self, write=os.write):
        write(1, b'leaked')

def slowly(parent, die_with_parent=signals.die_with_parent):
    time.sleep(0.5)  # a process that is stopped before could not die
    die_with_parent(parent)

leak, signals.die_with_parent = Leak(), slowly
"""


def test_all_die_with_their_driver_however_it_ends_and_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "leaks.py").write_text(LEAKS)
    code = 'forkserver.warm(["leaks"]); start("time:sleep", 60)'
    with driver(tmp_path, code) as process:
        (server,) = children_of(process.pid)
        gone_with(process, {server, *children_of(server)}, stopped=True)
        assert process.stdout is not None
        assert process.stdout.read() == ""


def driver(folder: Path, code: str) -> subprocess.Popen[str]:
    """A driver that has come to the end of its code, and waits."""
    process = started(f"{code}\nprint('ready', flush=True)\nsys.stdin.read()\n", folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def gone_with(process: subprocess.Popen[str], others: set[int], *, stopped: bool) -> None:
    """Assert that these die once the driver is killed."""
    handles = [os.pidfd_open(pid) for pid in others]
    for pid in others if stopped else ():
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    for handle in handles:
        assert select.select([handle], [], [], 30)[0]
        os.close(handle)


def test_what_is_printed_goes_to_the_ends_of_files(tmp_path: Path, capfd: Capture) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    out.write_text("before\n")
    kept = [os.dup(1), os.dup(2)]
    try:
        forkserver.print_to(out, err)
        os.write(1, b"as C does\n")
        os.write(2, b"a warning\n")
    finally:
        for number, before in enumerate(kept, start=1):
            os.dup2(before, number)
            os.close(before)
    assert (out.read_text(), err.read_text()) == ("before\nas C does\n", "a warning\n")
    assert capfd.readouterr() == ("", "")


def test_where_one_file_cannot_be_written_nothing_changes(tmp_path: Path, capfd: Capture) -> None:
    with pytest.raises(OSError, match="missing"):
        forkserver.print_to(tmp_path / "out", tmp_path / "missing" / "err")
    os.write(1, b"still here\n")
    assert capfd.readouterr().out == "still here\n"
