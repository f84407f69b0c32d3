"""A run that is asked to stop saves and says so; one whose worker dies starts again by itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import RunFolder, Trained, alive, run
from tests.integration.test_failures import _ranks, _training, _wait_until
from tests.integration.test_resume import _assert_equal


@pytest.mark.parametrize(
    ("asked", "code"),
    [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)],
    ids=lambda value: str(value),
)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(
    asked: signal.Signals, code: int, tmp_path: Path, trained: Trained
) -> None:
    process, children = _training(tmp_path)
    process.send_signal(asked)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code, err
    assert "resume=auto" in err
    _wait_until(lambda: not alive(children), 2)
    stopped = RunFolder(tmp_path / "here")
    assert (stopped.result["status"], stopped.result["resumable"]) == ("interrupted", True)
    last = max(step for step, _ in stopped.curve("loss/train"))
    trained("resume=auto", f"epochs={last // 20 + 2}", name="here")
    assert stopped.result["resumed_from"]["step"] >= last
    steps = [step for step, _ in stopped.curve("loss/train")]
    assert steps == sorted(set(steps))


def test_a_second_signal_ends_it_now(tmp_path: Path) -> None:
    process, children = _training(tmp_path)
    for pid in _ranks(children).values():
        os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(Exception, match="timed out"):
        process.communicate(timeout=1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
    _wait_until(lambda: not alive(children), 2)


def test_a_run_whose_worker_dies_starts_again_by_itself(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / "mortal.py").write_text(
        "import os, signal, pathlib\n"
        "from expt.models.mlp import MLP\n"
        "class Net(MLP):\n"
        "    steps = 0\n"
        "    def forward(self, images):\n"
        "        Net.steps += self.training\n"
        "        who = os.environ.get('RANK'), os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "        if Net.steps == 50 and who == ('1', '0'):\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().forward(images)\n"
    )
    settings = ("+model._target_=mortal.Net", "~model.hidden", "model.dropout=0.3", "epochs=4", "threads=1")
    done = run(*settings, "max_restarts=1", "checkpoint.every_steps=7", "hydra.run.dir=here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    restarted = RunFolder(tmp_path / "here")
    assert restarted.result["attempts"] == 2
    assert restarted.result["resumed_from"]["step"] in (35, 40, 42, 49)
    assert {"0", "1"} == set(os.listdir(tmp_path / "here" / "logs"))
    whole = trained("model.dropout=0.3", "epochs=4", "threads=1", "checkpoint.every_steps=7", name="whole")
    _assert_equal(restarted, whole)
