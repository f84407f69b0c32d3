"""TensorBoard on a sweep's folder, as a person sees it: in a headless Chromium."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.pictures.browser import Browser, Server, chromium, missing, tensorboard, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
COMPLETED, RUNS = 5, 6


class Page(NamedTuple):
    server: Server
    browser: Browser
    runs: list[str]

    def open(self, tab: str) -> Browser:
        self.browser.open(f"{self.server.address}#{tab}")
        return self.browser


@pytest.fixture(scope="module")
def page(sweep_of_six: Path) -> Iterator[Page]:
    runs = sorted(path.parent.name for path in sweep_of_six.glob("*/result.json"))
    assert len(runs) == RUNS
    with tensorboard(sweep_of_six) as server, chromium(2600, 1800) as browser:
        server.wait_for_tag("accuracy/test", COMPLETED)
        yield Page(server, browser, runs)


def test_scalars(page: Page) -> None:
    browser = page.open("scalars")
    tags = ("(objective)/accuracy/val", "accuracy/train", "accuracy/val", "accuracy/test", "best")
    browser.wait_for_texts(
        *page.runs, *tags, "loss", "lr", "speed", "memory", "norm_weights", "norm_gradients"
    )


def test_custom_scalars_need_no_click(page: Page) -> None:
    browser = page.open("custom_scalars")
    charts = ("loss/val", "accuracy/train", "learning rate", "memory of a worker [MiB]")
    browser.wait_for_texts(*page.runs, "Is it learning?", "Is the hardware busy?", *charts)
    # Loss and accuracy of train and of val, for each run that came so far.
    wait_for("matches", lambda: browser.texts().count(f"Matches ({COMPLETED})") >= 4)
    assert "Matches (0)" not in browser.texts(), "an empty chart"


def test_images(page: Page) -> None:
    browser = page.open("images")
    browser.wait_for_texts(
        *page.runs, "confusion/val", "confusion/test", "images/train", "mistakes"
    )
    wait_for("pictures", lambda: browser.count("img", "node.naturalWidth > 300") >= COMPLETED)


def test_hparams(page: Page) -> None:
    browser = page.open("hparams")
    first = "(objective)/accuracy/val"
    measured = (first, "accuracy/test", "accuracy/train", "accuracy/val", "best/accuracy/val")
    columns = ("model", "optimizer.lr", *measured)
    shown = browser.wait_for_texts("Trial ID", *page.runs, *columns, inside="tf-hparams-table-view")
    assert {"mlp", "convnet", "once.Net"} <= set(shown)
    browser.click("paper-tab", "node.textContent.includes('PARALLEL COORDINATES VIEW')")
    browser.wait_for_texts(
        *columns, "mlp", "convnet", "once.Net", inside="tf-hparams-parallel-coords-plot"
    )
    # A run without a value on one of the axes has no line: the one that failed, and no other.
    line = "node.parentNode.getAttribute('class') === 'foreground' && node.getAttribute('d')"
    wait_for("lines", lambda: browser.count("path", line) == COMPLETED)
