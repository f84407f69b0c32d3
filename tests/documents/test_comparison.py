"""What counts as the same as a page shows, and what a page asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.documents.comparison import difference
from scripts.documents.following import Answer, with_answers
from scripts.documents.pages import Command, File, steps

SHOWN = (
    "epoch 1/2  step 20/40  loss 1.2295  acc 0.6664  val 0.9306  img/s 17,167  best  00:01 left",
    "trained      0.2 s by 2 workers on the CPU, 12,008 images/s",
    "run folder   outputs/2026-11-22/17-33-32",
)


def test_times_speeds_and_dates_are_patterns() -> None:
    printed = (
        "epoch 1/2  step 20/40  loss 1.2295  acc 0.6664  val 0.9306  img/s 903  best",
        "trained      12.5 s by 2 workers on the CPU, 1,203.5 images/s",
        "run folder   outputs/2027-01-02/09-00-01",
    )
    assert difference(SHOWN, printed) is None
    assert difference((SHOWN[0], "...", SHOWN[2]), printed) is None


@pytest.mark.parametrize("exact", [True, False])
def test_another_word_or_line_is_told(exact: bool) -> None:
    assert difference(SHOWN, [*SHOWN[:2], "run folder   elsewhere"], exact=exact)
    assert difference(SHOWN, SHOWN[:2], exact=exact)
    assert difference(SHOWN[:2], SHOWN, exact=exact)
    assert difference((SHOWN[2], "...", SHOWN[0]), SHOWN, exact=exact), "in another order"


def test_another_digit_is_told_where_numbers_are_exact() -> None:
    printed = [SHOWN[0].replace("0.9306", "0.9305"), *SHOWN[1:]]
    assert "0.9305" in str(difference(SHOWN, printed))
    assert difference(SHOWN, printed, exact=False) is None


def test_the_runs_of_a_sweep_end_in_any_order() -> None:
    shown = [
        "sweep of 2 runs in grid",
        "[1/2] done  lr=0.1  0.5",
        "[2/2] done  lr=0.2  0.6",
        "lr  val",
    ]
    printed = [
        shown[0],
        "[1/2] done  lr=0.2  0.6  1.2 s in all",
        "[2/2] done  lr=0.1  0.5",
        shown[3],
    ]
    assert (
        difference([shown[0], *[f"{line}  0.4 s" for line in shown[1:3]], shown[3]], printed)
        is not None
    )
    printed = [
        shown[0],
        *(f"{line}  3.1 s" for line in (shown[2].replace("2/2", "1/2"), shown[1])),
        shown[3],
    ]
    assert (
        difference([shown[0], *[f"{line}  0.4 s in all" for line in shown[1:3]], shown[3]], printed)
        is None
    )
    assert difference([shown[0], "[1/2] done  lr=0.1  0.7  0.4 s", "...", shown[3]], printed)


PAGE = """# A page

```python
# net.py
width = 1
```

```yaml
# @package _global_
# conf/experiment/small.yaml
epochs: 1
```

```console
$ python net.py
1
$ python -m expt lr=1
error: there is no key
```

<!-- not run: needs a GPU -->
```bash
python -m expt gpus=1
```

<!-- needs: /nowhere -->
```bash
ls /nowhere
```
"""


def test_the_files_and_commands_of_a_page_in_order() -> None:
    net, small, plain, mistake, on_a_gpu, elsewhere = steps(PAGE)
    assert net == File("net.py", "# net.py\nwidth = 1\n")
    assert isinstance(small, File)
    assert Path(small.name) == Path("conf/experiment/small.yaml")
    assert isinstance(plain, Command)
    assert isinstance(mistake, Command)
    assert isinstance(on_a_gpu, Command)
    assert isinstance(elsewhere, Command)
    assert (plain.words, plain.shown, plain.not_run) == ("python net.py", ("1",), None)
    assert mistake.shown == ("error: there is no key",)
    assert (on_a_gpu.not_run, elsewhere.not_run) == ("needs a GPU", "/nowhere")
    assert Answer(plain, ("1",), 0).wrong() is None
    assert Answer(plain, ("1",), 1).wrong()
    assert Answer(mistake, mistake.shown, 2).wrong() is None
    assert Answer(mistake, mistake.shown, 0).wrong()
    assert with_answers(PAGE, [Answer(plain, ("2", "3"), 0)]) == PAGE.replace("\n1\n", "\n2\n3\n")
