"""`expt report SWEEP --html FILE`: one page that a reader of the sweep needs."""

import io
import re
from html import unescape
from importlib.util import find_spec
from pathlib import Path

import pytest

from expt.command import export
from expt.command.report import main
from expt.errors import ConfigError
from expt.runs.found import FoundRun
from expt.runs.paths import RunPaths
from expt.runs.result import update_result
from expt.runs.view import curves
from expt.runs.view.leaderboard import SHOWN, leaderboard
from expt.runs.view.settings import read_runs
from tests.command.test_report import leave
from tests.conftest import Trained
from tests.facade import Capture, Patch, record_points


def rows_of_first_table(text: str) -> list[list[str]]:
    rows = re.findall("<tr>(.*?)</tr>", text.partition("</table>")[0])
    return [[unescape(cell) for cell in re.findall("<t[hd].*?>(.*?)</t", row)] for row in rows]


def test_a_page_has_the_leaderboard_the_curves_and_the_best_runs_pictures(
    sweep_of_six: Path, tmp_path: Path
) -> None:
    assert main([str(sweep_of_six), "--html", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    table = leaderboard(read_runs(sweep_of_six))
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    assert rows_of_first_table(text)[1:] == [list(row) for row in zip(*columns, strict=True)]
    assert re.findall("<h2>(.*)</h2>", text) == [
        "Question",
        "Results",
        "Is the best one better?",
        "Learning curves",
        "What mattered",
        "The best",
    ]
    assert "<svg" in text
    assert "<pre>python -m expt " in text
    links = re.findall(r"""\s(?:src|href)=["']([^"']*)""", text)
    assert sum(link.startswith("data:image/png;base64,") for link in links) >= 1
    assert all(link.startswith(("data:", "#")) for link in links), "it needs no network"


def test_a_page_is_not_written_with_gaps(
    sweep_of_six: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    from expt import errors

    monkeypatch.setattr(
        errors, "find_spec", lambda name: None if name == "scipy" else find_spec(name)
    )
    with pytest.raises(errors.ConfigError, match=r"--html: needs scipy; pip install 'expt\["):
        main([str(sweep_of_six), "--html", str(tmp_path / "page.html")])
    assert not (tmp_path / "page.html").exists()


def test_a_page_of_many_runs_whose_texts_are_html(tmp_path: Path) -> None:
    for number in range(60):
        leave(Path("sweep", f"lr={number}"), number, 0.5 + number / 200, "<b>mlp</b>", lr=number)
    (tmp_path / "sweep/multirun.yaml").write_text("{}")
    assert main(["sweep", "--html", "page.html", "--filter", "optimizer.lr<50"]) == 0
    text = Path("page.html").read_text(encoding="utf-8")
    assert "<b>mlp" not in text
    assert "50 runs: 50 completed." in text
    assert re.search(r"and \d+ more runs", text)


def of_two(folder: Path, name: str, seed: int, losses: list[float]) -> FoundRun:
    """A run of one setting, and its losses on val."""
    run = folder / "sweep" / name
    leave(run, seed, 0.5, lr=0.1, seedless_identity="equal", overrides={"seed": seed})
    points = [(step, step, {"loss/val": loss}) for step, loss in enumerate(losses, 1)]
    record_points(RunPaths(run), *points)
    return FoundRun.at(run)


def test_curves_show_single_points_and_seeds_and_no_run_that_diverged_alone(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/multirun.yaml").write_text("{}")
    runs = [of_two(tmp_path, "seed=0", 0, [2.3, 1.1]), of_two(tmp_path, "seed=1", 1, [2.2])]
    runs.append(of_two(tmp_path, "seed=2", 2, [2.4, 1e19]))
    drawing = curves.learning_curves(runs, io.BytesIO())
    axes = drawing.axes[0]
    assert [line.get_marker() for line in axes.lines] == ["None", "_", "None"]
    low, high = axes.get_ylim()
    assert low < 1.1 < 2.4 < high < 30
    legend = [text.get_text() for text in drawing.legends[0].get_texts()]
    assert legend == ["seed=0", "seed=1", "seed=2"]


def test_a_page_has_every_row(tmp_path: Path) -> None:
    for number in range(SHOWN + 1):
        leave(Path("sweep", f"lr={number}"), number, 0.5, lr=number)
    (tmp_path / "sweep/multirun.yaml").write_text("{}")
    assert main(["sweep", "--html", "page.html"]) == 0
    text = Path("page.html").read_text(encoding="utf-8")
    assert len(rows_of_first_table(text)) == SHOWN + 2


@pytest.mark.parametrize(
    "words",
    [
        ("sweep/lr=1", "--html", "page.html"),
        ("sweep", "--html", "no/page.html"),
        ("sweep", "--html", "page.html", "--plot", "curves.png"),
        ("sweep", "--html", "page.html", "--sort", "accurracy"),
    ],
)
def test_a_page_that_cannot_be_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    from expt.errors import ConfigError

    leave(Path("sweep/lr=1"), 1, 0.5)
    (tmp_path / "sweep/multirun.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"--(html|sort)"):
        main(words)
    assert not Path("page.html").exists()


@pytest.mark.slow
def test_a_regressions_page_has_its_predictions_and_rows_are_made_once(
    trained: Trained, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """And the sweep's best run is exported by the sweep's name."""
    from expt.runs.view import settings

    run = trained("experiment=diabetes", "epochs=1", "world_size=1", name="sweep/a")
    (tmp_path / "sweep/multirun.yaml").write_text("search: [")
    settings._rows.cache_clear()
    assert main([str(tmp_path / "sweep"), "--html", str(tmp_path / "page.html")]) == 0
    assert settings._rows.cache_info().misses == 1
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Predictions of test" in text
    words = [f"{tmp_path / 'sweep'}@last", "--format", "torch_export", "--output"]
    assert export.main([*words, str(tmp_path / "best.pt2")]) == 0
    assert "run          " in capsys.readouterr().out
    assert text.count("<svg") == 2
    update_result(run.paths, eval_s=1e6)
    page = ["--html", str(tmp_path / "page.html")]
    with pytest.raises(ConfigError, match=r"page\.html: is there already; use --force"):
        main([str(tmp_path / "sweep"), *page])
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == text
    assert main([*page, "--force", str(tmp_path / "sweep")]) == 0
    assert (tmp_path / "page.html").read_text(encoding="utf-8").count("<svg") == 1
