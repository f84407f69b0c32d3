"""`--help`: the keys, the groups, and example commands, from the YAML that holds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from expt.command.conf_files import conf_dir
from expt.command.words import WORDS

EXAMPLES = (
    ("python -m expt", "an MLP on handwritten digits: all GPUs, or 2 workers on the CPU"),
    ("python -m expt model=resnet18 dataset=cifar10 gpus=4 amp=true", "ResNet-18 on 4 GPUs in mixed precision"),
    ("python -m expt -m model=mlp,convnet optimizer.lr=0.1,0.01", "a sweep of 2 x 2 runs"),
)


def print_help(console: Console, config_dir: str | None = None) -> None:
    """Print it; the options of a person's own `config_dir` are listed with expt's."""
    console.print(
        "expt trains what the command line describes.\n\n  [bold]python -m expt \\[KEY=VALUE ...] \\[-m][/]\n"
    )
    console.print("[bold]Examples[/]")
    for command, meaning in EXAMPLES:
        console.print(f"  {command}\n      [dim]{meaning}[/]", highlight=False)
    console.print("\n[bold]Commands[/]  (each with --help)")
    console.print(_table([(f"python -m expt {name}", word.meaning) for name, word in WORDS.items()]))
    console.print("\n[bold]Groups[/]  (choose: model=resnet18; set a key of the choice: model.stem=imagenet)")
    console.print(_groups([conf_dir(), *([Path(config_dir)] if config_dir else [])]))
    for title, rows in _sections(conf_dir() / "config.yaml"):
        console.print(f"\n[bold]{title}[/]")
        console.print(_table(rows))
    console.print("\n[bold]More[/]")
    more = [
        ("--cfg job", "print the configuration and start nothing"),
        ("--config-dir DIR", "add a folder of your own YAML, laid out as these groups are"),
        ("-m", "run every combination of values: key=a,b"),
        ('eval "$(expt -sc install=bash)"', "complete keys and values with the Tab key; for fish and zsh too"),
        ("--hydra-help", "what else Hydra offers"),
    ]
    console.print(_table(more))


def _groups(folders: list[Path]) -> Table:
    names: dict[str, list[str]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*/*.yaml")):
            names.setdefault(path.parent.name, []).append(path.stem)
    return _table((group, ", ".join(sorted(options))) for group, options in names.items())


def _sections(path: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """config.yaml as it is written: a comment line opens a section, a line is `key: value  # meaning`."""
    title, rows, prefix = "", list[tuple[str, str]](), ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("hydra:"):
            break
        if line.startswith("# "):
            if rows:
                yield title, rows
            title, rows = line.removeprefix("# "), []
        elif title and ":" in line:
            setting, _, meaning = line.partition("#")
            key, _, value = setting.partition(":")
            prefix = "" if not key.startswith(" ") else prefix
            if not value.strip():
                prefix = f"{key.strip()}."
                continue
            rows.append((f"{prefix}{key.strip()}={value.strip()}", meaning.strip()))
    yield title, rows


def _table(rows: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    for left, right in rows:
        table.add_row(escape(f"  {left}"), escape(right))
    return table
