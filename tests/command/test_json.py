"""`--json`: one document on stdout, whatever becomes of the command, and all else on stderr."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from expt.command import terminal
from expt.runs.paths import RunPaths, at_work
from expt.runs.result import Record
from tests.conftest import Typed
from tests.dashboards.folders import measure, record, sweep
from tests.facade import Capture, ended, environment, python, run, start

QUICK = ("model=mlp", "epochs=1", "dataset.train_limit=128", "world_size=1")


def document(done: subprocess.CompletedProcess[str]) -> Any:
    """The only thing on stdout, by a reader that takes no word that JSON does not have."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert done.stdout.count("\n") == 1, done.stdout
    content = json.loads(done.stdout, parse_constant=refuse)
    assert content["exit_code"] == done.returncode, done.stderr
    return content


def asked(*words: str, cwd: Path, **extra: str) -> Any:
    return document(run(*words, "--json", cwd=cwd, **extra))


def test_a_run_an_evaluation_and_a_list_of_runs(tmp_path: Path) -> None:
    done = run(*QUICK, "hydra.run.dir=one", "--json", cwd=tmp_path)
    found = document(done)
    (of_run,), written = found["runs"], json.loads((tmp_path / "one/result.json").read_text())
    assert of_run.pop("folder") == str(tmp_path / "one")
    assert of_run == {key: written[key] for key in of_run}
    assert written.keys() - of_run.keys() == {"git", "versions", "hardware", "hosts"} & {*written}
    assert found["error"] is None
    assert "run folder   one" in done.stderr
    measured = asked("evaluate", "one", "split=val", cwd=tmp_path)["evaluations"][0]
    assert measured["metrics"]["accuracy/val"] == of_run["metrics"]["accuracy/val"]
    listed = asked("report", ".", "--filter", "model=mlp", cwd=tmp_path)["runs"]
    assert [each["metrics"] for each in listed] == [of_run["metrics"]]
    predicted = asked("predict", "one", "--split", "test", "--top", "1", cwd=tmp_path)
    assert len(predicted["predictions"]) == 360


def test_a_cleared_cache_lists_removed_datasets(tmp_path: Path) -> None:
    (folder := tmp_path / "decoded" / "digits-0123456789abcdef.1").mkdir(parents=True)
    (folder / "images.npy").write_bytes(b"12")
    before = asked("cache", cwd=tmp_path, EXPT_CACHE=str(tmp_path))["datasets"]
    after = asked("cache", "--clear", cwd=tmp_path, EXPT_CACHE=str(tmp_path))
    assert [(each["path"], each["num_bytes"]) for each in before] == [(str(folder), 2)]
    assert (after["datasets"], after["removed"]) == ([], before)


def test_a_sweep_names_its_best_run_also_where_another_fails(tmp_path: Path) -> None:
    words = ("-m", *QUICK, "optimizer.lr=0.1,1e-6,1e30", "hydra.sweep.dir=grid", "-q")
    found = asked(*words, cwd=tmp_path)
    assert (found["exit_code"], found["error"]["kind"]) == (1, "SweepFailed")
    expected = {"lr=0.1": "completed", "lr=1e-06": "completed", "lr=1e+30": "failed"}
    assert {Path(each["folder"]).name: each["status"] for each in found["runs"]} == expected
    assert found["best_run"] == str(tmp_path / "grid/lr=0.1")
    again = asked("report", "grid", cwd=tmp_path)
    assert (again["runs"], again["best_run"]) == (found["runs"], found["best_run"])


@pytest.mark.usefixtures("own_handlers")
@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        ("epocs=1", 2, "ConfigError"),
        ("report nowhere", 2, "ConfigError"),
        ("report --no-such", 2, "ConfigError"),
        ("model=mlp epochs=1 world_size=1 optimizer.lr=1e30", 1, "Diverged"),
    ],
)
def test_an_error_is_in_it(words: str, code: int, kind: str, tmp_path: Path, typed: Typed) -> None:
    done = typed(*words.split(), "--json")
    found = document(done)
    assert (found["exit_code"], found["error"]["kind"]) == (code, kind)
    assert f"error: {found['error']['message'].splitlines()[0]}" in done.stderr
    assert [each["status"] for each in found["runs"]] == (["failed"] if code == 1 else [])


def test_a_list_holds_what_was_asked_for_in_that_order(tmp_path: Path) -> None:
    sweep(tmp_path / "grid")
    for lr, loss in ((0.1, 2.0), (0.01, 3.0), (0.001, 1.0)):
        record(
            tmp_path / f"grid/lr={lr}",
            status="completed",
            identity=str(lr),
            overrides={"optimizer.lr": lr, "augment": {"noise": 3 - loss}},
            config={"optimizer": {"lr": lr}},
            metrics={"loss/val": loss},
        )
    for words, losses in (
        (("--sort", "loss/val", "--filter", "optimizer.lr<0.1"), [1.0, 3.0]),
        (("--sort", "augment"), [3.0, 2.0, 1.0]),  # as it was typed
        (("--filter", "optimizer.lr<0"), []),
    ):
        found = asked("report", "grid", *words, cwd=tmp_path)
        assert [each["metrics"]["loss/val"] for each in found["runs"]] == losses
        assert bool(found["error"]) == (not losses)


@pytest.mark.parametrize(
    "words",
    [("hydra.run.dir=grid/one",), ("hydra.run.dir=grid/one", "resume=auto"),
     ("-m", "seed=0,1", "hydra.sweep.dir=grid")],
)  # fmt: skip
@pytest.mark.usefixtures("own_handlers")
def test_a_folder_in_use_is_told_from_a_mistake(
    words: tuple[str, ...], tmp_path: Path, typed: Typed
) -> None:
    paths = record(sweep(tmp_path / "grid") / "one")
    with at_work(RunPaths(tmp_path / "grid")), at_work(paths):
        found = document(typed(*QUICK, *words, "--json"))
    assert (found["exit_code"], found["error"]["kind"]) == (2, "FolderInUse")


@pytest.mark.usefixtures("own_handlers")
@pytest.mark.parametrize("words", ["plan grid/lr=0.1,seed=0", "plan grid", "./grid/lr=0.1,seed=0"])
def test_a_folder_is_no_setting(words: str, tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "grid/lr=0.1,seed=0").mkdir(parents=True)
    error = document(typed(*words.split(), "--json"))["error"]
    assert error["kind"] == "ConfigError"
    assert "is a folder" in error["message"]


def test_a_signal_after_the_document_leaves_the_exit_code(tmp_path: Path) -> None:
    program = (
        "import os, signal; from expt.command import main\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "main.main(['--version', '--json'])\n"
        "for number in (signal.SIGINT, signal.SIGTERM): os.kill(os.getpid(), number)"
    )
    assert document(python(program, cwd=tmp_path))["exit_code"] == 0


@pytest.mark.slow
def test_a_ctrl_c_that_a_library_drops_is_the_error(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, signal\nfrom torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(2, 2)\n"
        "        try: os.kill(os.getpid(), signal.SIGINT)\n"
        "        except KeyboardInterrupt: raise RecursionError\n"
    )
    found = asked("plan", "model={_target_: mine.Net}", cwd=tmp_path)
    assert (found["exit_code"], found["error"]["kind"]) == (130, "Interrupted")


def test_ctrl_c(tmp_path: Path) -> None:
    process = start(*QUICK, "epochs=100000", "hydra.run.dir=one", "--json", cwd=tmp_path)
    while not RunPaths(tmp_path / "one").last.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    found = document(ended(process))
    assert (found["exit_code"], found["error"]["kind"]) == (130, "Interrupted")
    assert "resume=auto" in found["error"]["message"]
    assert found["runs"][0]["status"] == "interrupted"


@pytest.mark.usefixtures("own_handlers")
def test_what_is_no_number_is_null(tmp_path: Path, typed: Typed) -> None:
    paths = record(tmp_path / "run", status="completed", metrics={"loss/val": float("nan")})
    measure(paths, 1)
    found = document(typed("report", str(tmp_path / "run"), "--json"))
    assert found["runs"][0]["metrics"] == {"loss/val": None}


def test_a_library_that_prints_and_a_process_that_it_starts_are_on_stderr(tmp_path: Path) -> None:
    program = (
        "import os; from expt.command import terminal\n"
        "with terminal.document(wanted=True): os.system('echo a'); print('b'); 1 / 0"
    )
    done = python(program, cwd=tmp_path)
    assert json.loads(done.stdout)["error"]["kind"] == "ZeroDivisionError"
    assert done.stderr.split()[:2] == ["a", "b"]


def test_the_page_for_programs_names_fields_that_there_are() -> None:
    text = (Path(__file__).parents[2] / "docs/programs.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    table = text.partition("## A run's record")[2].partition("\n## ")[0]
    fields = [
        name
        for row in re.findall(r"^\| (`.*?) \| ", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    ]
    assert len(fields) > 12
    assert {*fields} <= {"folder", *get_type_hints(Record)}


PRINTS = """
import os, sys
from expt.command import terminal
terminal.prepare()
mine = os.open("file", os.O_WRONLY | os.O_CREAT)
print("seen ≥ 0.5 ± 0.1 ☃", flush=True)
print("a mistake", file=sys.stderr, flush=True)
os.write(mine, str(mine > 2).encode())
"""


def printed(folder: Path, redirected: str, **extra: str) -> subprocess.CompletedProcess[str]:
    (folder / "prints.py").write_text(PRINTS)
    command = f"{sys.executable} prints.py {redirected}"
    return subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env=environment(**extra),
        capture_output=True,
        text=True,
        check=True,
    )


def test_a_command_hears_that_nobody_reads_any_more() -> None:
    ends, other = os.pipe()
    os.close(ends)
    console = terminal.console(quiet=False)
    console.file = os.fdopen(other, "w", closefd=False)
    with pytest.raises(BrokenPipeError):
        console.print("epoch 1")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_closed_stream_is_no_file_that_is_opened_later(tmp_path: Path, closed: str) -> None:
    done = printed(tmp_path, closed)
    assert (tmp_path / "file").read_text() == "True"
    assert done.stdout == ("seen ≥ 0.5 ± 0.1 ☃\n" if closed == "2>&-" else "")
    assert done.stderr == ("a mistake\n" if closed == ">&-" else "")


def test_what_a_terminal_cannot_show_ends_nothing(tmp_path: Path) -> None:
    assert printed(tmp_path, "", PYTHONIOENCODING="ascii").stdout == "seen ? 0.5 ? 0.1 ?\n"


def test_a_quiet_console_prints_nothing(capsys: Capture) -> None:
    for quiet in (True, False):
        console = terminal.console(quiet=quiet)
        console.print("a number")
        console.file.write("a line\n")
        assert capsys.readouterr() == ("" if quiet else "a number\na line\n", "")
