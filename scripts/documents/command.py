"""The command line of scripts/follow."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.documents.following import ROOT, environment, follow, printed_here, with_answers


def main() -> None:
    """Follow each page in a folder of its own; exit 1 where one is not as it says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument(
        "--clone", action="store_true", help="with expt from a fresh clone of what is committed"
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help="in the clone, with the commands that install packages",
    )
    parser.add_argument("--write", action="store_true", help="put what was printed into the page")
    chosen = parser.parse_args()
    exact, wrong = printed_here(), 0
    if not exact:
        print("numbers are not compared: this is not a machine as the pages' numbers are from")
    for page in chosen.pages:
        with tempfile.TemporaryDirectory(prefix="expt-follow-") as scratch:
            folder, root = Path(scratch) / "work", ROOT
            folder.mkdir()
            if chosen.clone or chosen.install:
                root = Path(scratch) / "expt"
                subprocess.run(
                    ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(root)], check=True
                )
            env = environment(Path(scratch), root)
            if chosen.install:
                folder = root  # the page begins in a clone
                env["HOME"] = str(Path.home())  # where pip is told of its mirrors
                del env["PYTHONPATH"]
            text = page.read_text(encoding="utf-8")
            answers = follow(text, folder, env, install=chosen.install)
        for answer in answers:
            said = answer.wrong(exact=exact)
            wrong += said is not None
            print(f"{page.name}: $ {answer.command.words}")
            print(said or ("as shown" if answer.command.shown else "ran"))
        if chosen.write:
            page.write_text(with_answers(text, answers), encoding="utf-8")
    sys.exit(1 if wrong and not chosen.write else 0)
