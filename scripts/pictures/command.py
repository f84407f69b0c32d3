"""The command line of scripts/screenshots."""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from scripts.pictures.browser import Browser, chromium, missing, tensorboard, wait_for

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
SWEEPS = ROOT / "docs" / "sweeps.md"
MAX_BYTES = 150_000
SINGLE = (
    "model=convnet dataset=fashion_mnist dataset.train_limit=20000 dataset.augment.flip=true"
    " scheduler=cosine epochs=6"
)
SWEEP = (
    "-m model=mlp,paddle_convnet,convnet optimizer.lr=0.3,0.1,0.03,0.01 "
    "dataset=fashion_mnist dataset.train_limit=6000 epochs=3 world_size=1"
)
WIDTHS = (80, 140)
OTHER_COLUMN = (  # HPARAMS fills the table up to five settings
    "node.classList.contains('hparam-checkbox') && node.checked"
    " && !['model', 'optimizer.lr'].includes(node.textContent.trim())"
)
# Two runs under way, both of which have been evaluated, and some that are done.
UNDER_WAY = re.compile(
    r"^\[[4-9]/12\] .*\n(?s:.*)^running .*\n(?:\S.* 0\.\d{4} +0\.\d{4} .*\n){2}.* running, ", re.M
)


def main() -> None:
    """Run, look, and write the pictures beside this file and the screens into docs/sweeps.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--root", help="folder of the real Fashion-MNIST (default: where Debian's package puts it)"
    )
    parser.add_argument(
        "--keep", type=Path, help="folder for the runs, kept; those that it holds are not run again"
    )
    args = parser.parse_args()
    if said := missing() or (None if shutil.which("tmux") else "needs Debian's package tmux"):
        sys.exit(f"error: {said}")
    more = [f"dataset.root={Path(args.root).resolve()}"] if args.root else []
    with tempfile.TemporaryDirectory(prefix="expt-screenshots-") as scratch:
        work = args.keep.resolve() if args.keep else Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        runs(work, more)
        for name, png in pictures(work):
            write(name, png)


def runs(work: Path, more: list[str]) -> None:
    """One run in `work`/outputs, and the sweep once for each width of the terminal."""
    if not (work / "outputs" / "run").exists():
        _run([*SINGLE.split(), "hydra.run.dir=outputs/run", *more], work)
    for columns in WIDTHS:
        if not (work / f"{columns}").exists():
            (work / f"{columns}").mkdir()
            put_into_page(columns, live_table(work / f"{columns}", columns, more))


def _run(words: list[str], cwd: Path) -> None:
    subprocess.run([sys.executable, "-m", "expt", *words], cwd=cwd, env=_environment(), check=True)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def live_table(work: Path, columns: int, more: list[str]) -> str:
    """What a terminal of that many columns shows while the sweep runs in `work`, read from a real
    terminal.
    """
    tmux, words = ["tmux", "-L", f"expt-screenshots-{os.getpid()}"], [*SWEEP.split(), *more]
    command = [sys.executable, "-m", "expt", *words]
    size = ["-x", str(columns), "-y", "40"]
    start = [
        *tmux,
        "-f",
        "/dev/null",
        "new-session",
        "-d",
        *size,
        "-c",
        str(work),
        "-e",
        f"PYTHONPATH={ROOT}",
    ]
    # An exit status, so that the end can be told from a failure; then the pane goes, and with it
    # the server.
    subprocess.run([*start, f"{shlex.join(command)}; echo $? > status"], check=True)

    def screen() -> str:
        if (work / "status").exists():
            sys.exit(
                f"error: {shlex.join(command)} ended before two of its runs were seen side by side"
            )
        shown = subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True)
        return shown.stdout if UNDER_WAY.search(shown.stdout) else ""

    found: str = wait_for("table with two runs", screen, timeout_s=600)
    wait_for("end of the sweep", (work / "status").exists, timeout_s=1200)
    return "\n".join(line.rstrip() for line in found.rstrip().splitlines())


def put_into_page(columns: int, screen: str) -> None:
    """Replace the block of text that follows the comment for that many columns."""
    text = SWEEPS.read_text(encoding="utf-8")
    block = re.compile(
        rf"(<!-- scripts/screenshots: {columns} columns -->\n+```text\n)(?s:.*?)(```)", re.S
    )
    replaced, times = block.subn(lambda match: f"{match[1]}{screen}\n{match[2]}", text)
    if times != 1:
        sys.exit(f"error: docs/sweeps.md has {times} places for the screen of {columns} columns")
    SWEEPS.write_text(replaced, encoding="utf-8")


def pictures(work: Path) -> Iterator[tuple[str, bytes]]:
    """Name and PNG of each picture."""
    with tensorboard(work / "outputs") as server:
        server.wait_for_tag("accuracy/test", 1)
        with chromium(1480, 1060) as browser:
            browser.open(f"{server.address}#custom_scalars")
            browser.wait_for_texts(
                "loss/val", "accuracy/train", "learning rate", "memory of a worker [MiB]"
            )
            yield "scalars", at_rest(browser)
        with chromium(1560, 770) as browser:
            browser.open(f"{server.address}#images&tagFilter=val%7Ctrain")
            browser.wait_for_texts("confusion/val", "mistakes/val", "images/train")
            wait_for("pictures", lambda: browser.count("img", "node.naturalWidth > 300") >= 3)
            yield "images", at_rest(browser)
    (sweep,) = (work / f"{WIDTHS[-1]}" / "outputs" / "sweeps").iterdir()
    with tensorboard(sweep) as server:
        server.wait_for_tag("accuracy/test", 12)
        with chromium(1760, 640) as browser:
            browser.open(f"{server.address}#hparams")
            browser.wait_for_texts(
                "Trial ID", "optimizer.lr", "loss/test", inside="tf-hparams-table-view"
            )
            browser.click("paper-checkbox", OTHER_COLUMN)
            yield "hparams", at_rest(browser)


def at_rest(browser: Browser) -> bytes:
    """A screenshot, once two that follow each other are the same: charts move until they are
    drawn.
    """
    seen: list[bytes] = [b""]

    def still() -> bool:
        seen.append(browser.driver.get_screenshot_as_png())
        return seen[-1] == seen[-2]

    wait_for("page at rest", still, poll_s=0.5)
    return seen[-1]


def write(name: str, png: bytes) -> None:
    """Write a picture beside this file, in 256 colours."""
    path, file = FOLDER / f"{name}.png", io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256).save(file, "PNG", optimize=True)
    if len(file.getvalue()) > MAX_BYTES:
        sys.exit(f"error: {path} would have {len(file.getvalue()):,} bytes")
    path.write_bytes(file.getvalue())
    print(path)
