"""`--help`: the keys, the groups, and example commands, from the YAML that holds them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from expt.command.conf_files import (
    conf_here,
    groups,
    keys,
    read_yaml,
    refuse_hidden,
    unknown_option,
)
from expt.command.words import WORDS, options_of
from expt.config.keys import choices_of, described
from expt.config.kinds import conf_dir
from expt.errors import ConfigError, did_you_mean
from expt.runs.view.text import Console

EXAMPLES = (
    ("python -m expt", "an MLP on handwritten digits, on all GPUs or with 2 workers on the CPU"),
    (
        "python -m expt model=resnet18 dataset=cifar10 gpus=4 amp=true",
        "ResNet-18 on 4 GPUs in mixed precision",
    ),
    ("python -m expt -m model=mlp,convnet optimizer.lr=0.1,0.01", "a sweep of 2 x 2 runs"),
)
COMMON = (
    *("model", "dataset", "task", "optimizer", "scheduler", "experiment"),
    *("epochs", "batch_size", "optimizer.lr", "seed", "gpus", "amp", "compile"),
    *("objective", "early_stop", "weights", "resume"),
)
"""The choices and keys that most people use, shown where nothing else is asked for."""
MORE = (
    ("--help all", "every choice and every setting"),
    ("--help model=convnet", "the settings of a choice"),
    ("--help checkpoint", "the settings below a key"),
    ("-m", "run every combination of values: key=a,b"),
    ("hydra.run.dir=DIR", "where to write the run; for a sweep hydra.sweep.dir"),
)
REST = (
    ("--cfg job", "print the configuration and start nothing"),
    ("--config-dir DIR", "add a folder of custom YAML, with groups as these (conf, if here)"),
    ("-q, --quiet", "print only errors and warnings"),
    ("--json", "for programs: print one JSON document to stdout, and all else to stderr"),
    ('eval "$(expt -sc install=bash)"', "complete with the Tab key; fish and zsh too"),
    ("--hydra-help", "what else Hydra offers"),
)

WHEN = " When: "
"""The beginning of the last sentence of a key's comment, which only docs/settings.md shows."""


def print_help(console: Console, arguments: Sequence[str] = ()) -> None:
    """Print common settings, or those that `arguments` name: a choice, keys, or `all`.

    Raises ConfigError for a word that it has nothing to say about.
    """
    options = options_of([word for word in arguments if word not in ("--help", "-h", "help")])
    own = options.config_dir or conf_here(options.settings)
    folders = [conf_dir(), *([Path(own)] if own else [])]
    if own:
        refuse_hidden(Path(own))
    names = _names(folders)
    words = [word for word in options.settings if word != "all"]
    _refuse_unknown(words, names)

    def section(title: str, rows: Iterable[tuple[str, str]], about: str = "") -> None:
        console.print(Text.assemble("\n", (title, "bold"), about and f"  {about}"))
        console.print(_table(rows))

    every = [
        (title, [(row, meaning.partition(WHEN)[0]) for row, meaning in rows])
        for title, rows in (*sections(conf_dir() / "config.yaml"), *_of_choices(words, folders))
    ]
    if words:  # only those that they name
        named = (word.partition("=") for word in words)
        choices = {f"{group}={each}" for group, _, value in named for each in value.split(",")}
        for title, rows in every:
            chosen = title.partition("  ")[0] in choices
            found = [row for row in rows if chosen or _is_below(row[0], words)]
            if chosen or found:
                section(title, [(row, _with_effect(row, meaning)) for row, meaning in found])
        return
    console.print("expt trains PyTorch models.\n")
    console.print("  python -m expt [KEY=VALUE ...] [-m]", style="bold")
    console.print("\nExamples", style="bold")
    for command, meaning in EXAMPLES:
        console.print(Text.assemble(f"  {command}\n      ", (meaning, "dim")))
    if "all" in options.settings:
        about = "(choose: model=resnet18; set a key of the choice: model.stem=imagenet)"
        rows = [(group, ", ".join(sorted(each))) for group, each in names.items()]
        section("Groups", rows, about)
        for title, rows in every:
            section(title, [(row, _with_effect(row, meaning)) for row, meaning in rows])
        commands = [(f"python -m expt {word}", meaning) for word, meaning in WORDS.items()]
        section("Commands", commands, "(each with --help)")
        section("More", (*MORE, *REST))
        return
    common = [group for group in names if group in COMMON or group not in groups()]
    section("Choices", [(group, ", ".join(sorted(names[group]))) for group in common])
    meant = {row.partition("=")[0]: (row, meaning) for _, rows in every for row, meaning in rows}
    first = (meant[key] for key in COMMON if key in meant)
    section("Settings", [(row, meaning.partition(";")[0]) for row, meaning in first])
    section("More", [*MORE, ("COMMAND --help", f"the options of a command: {', '.join(WORDS)}")])


def _of_choices(
    words: Sequence[str], folders: Sequence[Path]
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the chosen option of each group with its description, and its rows."""
    chosen = ((group, name) for group, each in _chosen(words).items() for name in each.split(","))
    for group, name in chosen:
        paths = (folder / group / f"{name}.yaml" for folder in folders)
        lines = next(filter(Path.is_file, paths)).read_text(encoding="utf-8").splitlines()
        about = (line[2:] for line in lines if line[:2] == "# " and line[2:3] != "@")
        yield f"{group}={name}  {' '.join(about)}", keys_with_meaning(lines, f"{group}.")


def _is_below(row: str, words: Iterable[str]) -> bool:
    key = row.partition("=")[0]
    return any(f"{key}.".startswith(f"{word.partition('=')[0]}.") for word in words)


def _with_effect(row: str, meaning: str) -> str:
    effect = described(row.partition("=")[0])
    return f"{meaning} [{effect}]" if effect else meaning


def _names(folders: list[Path]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*/*.yaml"))):
        names.setdefault(path.parent.name, []).append(path.stem)
    return {group: [*dict.fromkeys(several)] for group, several in names.items()}


def _refuse_unknown(arguments: Sequence[str], names: Mapping[str, Sequence[str]]) -> None:
    for word in arguments:
        group, equals, value = word.partition("=")
        if not equals and not any(f"{key}.".startswith(f"{word}.") for key in keys()):
            choices = [f"{group}={name}" for group, several in names.items() for name in several]
            chosen = next((each for each in choices if each.endswith(f"={word}")), "")
            hint = did_you_mean(word, [*WORDS, *names, *keys()])
            hint = f" Did you mean '{chosen}'?" if chosen else hint
            raise ConfigError(
                f"{word}: --help takes a command, a key, or a choice such as model=convnet;"
                f" --help all shows every key.{hint}"
            )
        for name in value.split(",") if equals and group in names else ():
            if name not in names[group]:
                raise ConfigError(unknown_option(f"{group}/{name}", names[group]))


def _chosen(arguments: Sequence[str]) -> Mapping[str, str]:
    """Return the option of each group that has one: the last that is typed, or the default."""
    defaults = read_yaml(conf_dir() / "config.yaml")["defaults"]
    chosen = {
        group: name for item in defaults if isinstance(item, dict) for group, name in item.items()
    }
    typed = (word.partition("=") for word in arguments)
    chosen |= {group: name for group, _, name in typed if name and group in chosen}
    return {
        group: name for group, name in chosen.items() if name and not group.startswith("override ")
    }


def sections(path: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the sections of config.yaml, each opened by a comment line, and their rows."""
    title, lines = "", list[str]()
    for line in path.read_text(encoding="utf-8").partition("\nhydra:")[0].splitlines():
        if line.startswith("# "):
            if title:
                yield title, keys_with_meaning(lines)
            title, lines = line.removeprefix("# "), []
        lines.append(line)
    yield title, keys_with_meaning(lines)


def keys_with_meaning(lines: Iterable[str], group: str = "") -> list[tuple[str, str]]:
    """Return `key=value` and its meaning of lines such as `key: value  # meaning`.

    Keys below an indented `key:` are dotted.
    """
    prefix, found = "", list[tuple[str, str]]()
    for line in lines:
        setting, _, meaning = line.partition("#")
        key, colon, value = setting.partition(":")
        if found and line.startswith(" ") and not setting.strip():  # a meaning's second line
            found[-1] = (found[-1][0], f"{found[-1][1]} {meaning.strip()}")
        if not colon or (group and (key == "name" or key.lstrip().startswith("-"))):
            continue
        prefix = prefix if key.startswith(" ") else ""
        if value.strip():
            found.append((f"{group}{prefix}{key.strip()}={value.strip()}", meaning.strip()))
        else:
            prefix = f"{key.strip()}."
    return found


def _table(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    for left, right in rows:
        table.add_row(f"  {left}", right)
    return table


def print_completions() -> None:
    """Print completions of the line in the environment of Hydra's completion script."""
    line = os.environ.get("COMP_LINE", "")
    words = line.split(maxsplit=3 if line.startswith("python") else 1)
    print("\n".join(completed(words[-1] if len(words) in (2, 4) else "")))


def completed(line: str) -> list[str]:
    """Return the words that the last one of `line` may become; a shell offers files for none."""
    typed = line.split() if line[-1:].strip() else [*line.split(), ""]
    *before, last = typed or [""]
    if before and before[0] in WORDS:
        return []
    words = [] if before else [word for word in WORDS if word.startswith(last)]
    return sorted({*words, *_settings(last)})


def _settings(word: str) -> list[str]:
    """Return completions of a setting: a key up to its next dot, or its values."""
    key, equals, _ = word.partition("=")
    if equals:
        found = dict.fromkeys(f"{key}={value}" for value in (*choices_of(key), *_options(key)))
        return [each for each in found if each.startswith(word)]
    depth = word.count(".") + 1
    found = dict.fromkeys(".".join(each.split(".")[:depth]) for each in keys())
    known = {*keys()}
    whole = [f"{each}=" for each in found if each in known]
    leading = [f"{each}." for each in found if any(key.startswith(f"{each}.") for key in known)]
    return [each for each in [*whole, *leading] if each.startswith(word)]


def _options(group: str) -> list[str]:
    own = conf_here([f"{group}="])
    return _names([conf_dir(), *([Path(own)] if own else [])]).get(group, [])
