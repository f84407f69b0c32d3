"""A run that is used after an edit, a refusal, a move, or from another folder."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.facade import RunFolder, as_typed, run

SHORT = as_typed("dataset.train_limit=64 world_size=1 threads=1 tensorboard.images=false")
SOURCE = "import torch\nclass Mine(torch.optim.SGD): pass\n"
OWN = ("optimizer=mine", *SHORT)


def code_of(*words: str, cwd: Path) -> tuple[int, str]:
    done = run(*words, cwd=cwd)
    return done.returncode, done.stderr


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with an optimizer of its own, and a run `r` of one epoch with it."""
    folder = tmp_path / "project"
    (folder / "conf/optimizer").mkdir(parents=True)
    (folder / "conf/optimizer/mine.yaml").write_text("_target_: mine_here.Mine\nlr: 0.1\n")
    (folder / "mine_here.py").write_text(SOURCE)
    assert code_of(*OWN, "epochs=1", "hydra.run.dir=r", cwd=folder)[0] == 0
    return folder


@pytest.mark.slow
def test_a_run_that_continues_with_edited_source_is_resumed_itself(project: Path) -> None:
    (project / "mine_here.py").write_text(f"{SOURCE}\nEDITED = 1\n")
    code, said = code_of(*OWN, "epochs=2", "resume=r", "hydra.run.dir=new", cwd=project)
    assert (code, "source of its custom classes has changed" in said) == (0, True)
    code, said = code_of("hydra.run.dir=new", "resume=auto", "epochs=3", cwd=project)
    assert code == 0, said


def test_classes_that_are_not_found_from_here_are_not_said_to_have_changed(
    project: Path, tmp_path: Path
) -> None:
    before = (project / "r/result.json").read_bytes()
    for words in (("hydra.run.dir=project/r", "resume=auto", "epochs=2"), ("rerun", "project/r")):
        code, said = code_of(*words, cwd=tmp_path)
        assert code == 2
        assert "No module named 'mine_here'" in said
        assert f"project/r was started in {project}, which has mine_here.py" in said
    assert (project / "r/result.json").read_bytes() == before
    assert code_of("evaluate", "project/r", cwd=tmp_path) == (0, ""), "it needs no optimizer"


@pytest.mark.slow
def test_a_project_that_was_moved_has_its_settings_here(project: Path, tmp_path: Path) -> None:
    moved = project.rename(tmp_path / "moved")
    code, said = code_of("hydra.run.dir=r", "resume=auto", "epochs=2", cwd=moved)
    assert code == 0, said
    shutil.rmtree(moved / "conf")
    code, said = code_of("hydra.run.dir=r", "resume=auto", "epochs=3", cwd=moved)
    assert (code, f"--config-dir {moved}" in said) == (2, True)


def test_words_of_a_refused_resume_are_not_kept(tmp_path: Path) -> None:
    assert code_of(*SHORT, "epochs=1", "hydra.run.dir=r", cwd=tmp_path)[0] == 0
    before = {path: path.read_text() for path in (tmp_path / "r/.hydra").iterdir()}
    words = ("hydra.run.dir=r", "resume=auto")
    refused = code_of(*words, "epochs=5", "callbacks=[{_target_: nowhere.Mine}]", cwd=tmp_path)
    assert refused[0] == 2
    assert {path: path.read_text() for path in (tmp_path / "r/.hydra").iterdir()} == before
    assert code_of(*words, "epochs=2", cwd=tmp_path)[0] == 0
    assert RunFolder(tmp_path / "r").result["config"]["epochs"] == 2


@pytest.mark.slow
def test_a_resumed_run_may_have_a_callback_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "seen_here.py").write_text("import expt\nclass Seen(expt.Callback): pass\n")
    assert code_of(*SHORT, "epochs=1", "hydra.run.dir=r", cwd=tmp_path)[0] == 0
    words, seen = ("hydra.run.dir=r", "resume=auto"), "callbacks=[{_target_: seen_here.Seen}]"
    for more in (("epochs=2", seen), ("epochs=3",), ("epochs=4", "callbacks=[]")):
        code, said = code_of(*words, *more, cwd=tmp_path)
        assert code == 0, said
    (tmp_path / "seen_here.py").write_text("import expt\nclass Seen(expt.Callback): a = 1\n")
    assert code_of(*words, "epochs=5", cwd=tmp_path)[0] == 0, "it has none now"


@pytest.mark.slow
def test_a_table_that_is_not_here_is_found_where_the_run_was_started(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    rows = "\n".join(f"{3 * x},{x * x}" for x in range(100))
    (there / "t.csv").write_text(f"x,y\n{rows}\n")
    table = as_typed("task=regression dataset=table dataset.path=t.csv dataset.targets=y epochs=1")
    own = (*table, "dataset.standardise_targets=true", "world_size=1", "threads=1")
    assert code_of("-m", *own, "seed=0,1", "hydra.sweep.dir=s", cwd=there)[0] == 0

    predicted = run("predict", "s", "t.csv", cwd=there)  # of the best run, which is named
    assert (predicted.returncode, "run          s/seed=" in predicted.stderr) == (0, True)
    predicted = run("predict", "s/seed=0", "t.csv", cwd=there)
    assert (predicted.returncode, predicted.stderr) == (0, "")

    def line(*words: str) -> str:
        done: subprocess.CompletedProcess[str] = run(*words, "--json", cwd=tmp_path)
        assert done.returncode == 2
        return str(json.loads(done.stdout)["error"]["message"])

    for name in ("there/s/seed=0", "there/s/seed=0@last", "there/s"):
        assert f"was started in {there}, which has t.csv" in line("evaluate", name)
    assert "was started in" not in line("evaluate", "there/s", "dataset.path=u.csv")
    assert "was started in" not in line("evaluate", "there/s", "split=some")
    (there / "s/seed=0/.hydra/hydra.yaml").write_text("{")
    assert "was started in" not in line("evaluate", "there/s/seed=0")
