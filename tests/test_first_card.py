"""scripts/first_card: it says that there is no card, and goes on after a failure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.cards.command import SOFTWARE, Table, run_part
from scripts.cards.parts import PARTS, Row
from tests.conftest import Cards
from tests.facade import alive, environment

FIRST_CARD = Path(__file__).parents[1] / "scripts" / "first_card"
HANGS = """
import json, subprocess, sys
print(json.dumps(["a case", "1 s", ""]), flush=True)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(json.dumps(["its child", str(child.pid), ""]), flush=True)
child.wait()
"""
FAILS = "import sys; print('the card is on fire', file=sys.stderr); sys.exit(1)"


def test_no_card_is_an_error_of_usage() -> None:
    done = subprocess.run(
        [sys.executable, str(FIRST_CARD)], env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: torch sees no GPU")


def test_a_part_that_hangs_or_fails_is_a_row_and_leaves_its_figures(tmp_path: Path) -> None:
    rows = list[str]()
    table = Table(rows.append, SOFTWARE)
    for name, program, limit_s in (("hangs", HANGS, 2.0), ("fails", FAILS, 60.0)):
        command, log = [sys.executable, "-c", program], tmp_path / name
        assert not run_part(command, name, table, limit_s=limit_s, log=log)
    done = f"print('{json.dumps(Row('works', '2 s'))}')"
    assert run_part([sys.executable, "-c", done], "last", table, limit_s=60, log=tmp_path / "last")
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows]
    assert [row[0] for row in cells] == [
        f"{SOFTWARE}: {name}" for name in ("hangs", "hangs", "hangs", "fails", "last")
    ]
    assert [row[2] for row in cells[::2]] == ["1 s", "not ended after 2 s", "2 s"]
    assert cells[3][2:] == ["failed", "the card is on fire"]
    assert not alive({int(cells[1][2])})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_part_works_on_a_soft_gpu_and_is_marked_so(cards: Cards, tmp_path: Path) -> None:
    variables = cards(count=1)
    done = subprocess.run(
        [sys.executable, str(FIRST_CARD), "--seconds=800", f"--logs={tmp_path}"],
        env=environment(**variables), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert all(row.startswith(f"| {SOFTWARE}: ") for row in rows)
    found = [row.split(" | ")[0].rpartition(": ")[2] for row in rows]
    assert list(dict.fromkeys(found)) == list(PARTS)
    unshown = [row for row in rows if "not begun" in row]
    assert len(unshown) == sum(not part.on_software for part in PARTS.values())
    assert "MISSED" not in done.stdout
