"""`--help`, and the words that the Tab key offers: from the YAML that has keys and groups."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from rich.table import Table
from rich.text import Text

from expt.command.conf_files import groups, keys_in_yaml, keys_of, lineage, options, own_folders
from expt.command.mistakes import unknown_option
from expt.command.words import WORDS, options_of
from expt.config import conf_dir, read_yaml
from expt.config.keys import choices_of, effects_in_words
from expt.errors import ConfigError, did_you_mean
from expt.runs.view.text import Console

Row: TypeAlias = tuple[str, str]
"""A setting as `key=value`, and its meaning."""


class Section(NamedTuple):
    """Rows below a title, which may have a remark next to it."""

    title: str
    about: str
    rows: list[Row]


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
    typed = options_of([word for word in arguments if word not in ("--help", "-h", "help")])
    folders = [conf_dir(), *own_folders(typed.config_dir, typed.settings)]
    names = (path.parent.name for folder in folders for path in sorted(folder.glob("*/*.yaml")))
    choices = {group: options(group, *folders) for group in dict.fromkeys(names)}
    words = [word for word in typed.settings if word != "all"]
    for word in words:
        _refuse_unknown(word, choices)
    settings = [*sections(conf_dir() / "config.yaml"), *_of_choices(words, folders, choices)]
    shown: Iterable[Section]
    if words:
        rows = [(each, ", ".join(sorted(choices[each]))) for each in words if each in choices]
        shown = [*([Section("Choices", "", rows)] if rows else []), *_named(words, settings)]
    else:
        shown = (_all if "all" in typed.settings else _common)(settings, choices)
        console.print("expt trains PyTorch models.\n")
        console.print("  python -m expt [KEY=VALUE ...] [-m]", style="bold")
        console.print("\nExamples", style="bold")
        for command, meaning in EXAMPLES:
            console.print(Text.assemble(f"  {command}\n      ", (meaning, "dim")))
    for title, about, rows in shown:
        remark = f"  {about}" if about else ""
        console.print(Text.assemble("\n", (title, "bold"), remark))
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=True)
        table.add_column(no_wrap=True)
        table.add_column(style="dim")
        for left, right in rows:
            table.add_row(f"  {left}", right)
        console.print(table)


def _named(words: Sequence[str], settings: Iterable[Section]) -> Iterator[Section]:
    """Yield the settings of chosen options, and those below keys."""
    named = [word.partition("=") for word in words]
    chosen = {f"{group}={each}" for group, _, value in named for each in value.split(",")}
    below = tuple(f"{key}." for key, *_ in named)
    for title, about, rows in settings:
        found = [row for row in rows if f"{row[0].partition('=')[0]}.".startswith(below)]
        if title in chosen:
            found = rows
        if found or title in chosen:
            rows = [_with_effect(row, of_changes=False) for row in found]
            yield Section(title, about, rows)


def _all(settings: Iterable[Section], choices: Mapping[str, Sequence[str]]) -> Iterator[Section]:
    about = "(choose: model=resnet18; set a key of the choice: model.stem=imagenet)"
    rows = [(group, ", ".join(sorted(each))) for group, each in choices.items()]
    yield Section("Groups", about, rows)
    for section in settings:
        yield section._replace(rows=[*map(_with_effect, section.rows)])
    commands = [(f"python -m expt {word}", meaning) for word, meaning in WORDS.items()]
    yield Section("Commands", "(each with --help)", commands)
    yield Section("More", "", [*MORE, *REST])


def _common(settings: Iterable[Section], choices: Mapping[str, Sequence[str]]) -> Iterator[Section]:
    common = [group for group in choices if group in COMMON or group not in groups()]
    rows = [(group, ", ".join(sorted(choices[group]))) for group in common]
    yield Section("Choices", "", rows)
    meant = {row[0].partition("=")[0]: row for section in settings for row in section.rows}
    first = (meant[key] for key in COMMON if key in meant)
    rows = [(setting, re.split(";|" + WHEN, meaning)[0]) for setting, meaning in first]
    yield Section("Settings", "", rows)
    of_commands = ("COMMAND --help", f"the options of a command: {', '.join(WORDS)}")
    yield Section("More", "", [*MORE, of_commands])


def _of_choices(
    words: Sequence[str], folders: Sequence[Path], choices: Mapping[str, Sequence[str]]
) -> Iterator[Section]:
    """Yield the chosen option of each group with its description, and its rows."""
    defaults = read_yaml(conf_dir() / "config.yaml")["defaults"]
    chosen = dict(pair for each in defaults if isinstance(each, dict) for pair in each.items())
    typed = (word.partition("=") for word in words)
    chosen |= {group: name for group, _, name in typed if name and group in choices}
    for group, _, key in (word.partition(".") for word in words if "=" not in word):
        having = [name for name in choices.get(group, ()) if _has(group, name, key)] if key else []
        if having and chosen[group] not in having:
            chosen[group] = ",".join(having)
    for group, names in chosen.items():
        if not names or group.startswith("override "):
            continue
        for name in names.split(","):
            paths = (folder / group / f"{name}.yaml" for folder in folders)
            path = next(filter(Path.is_file, paths))
            lines = path.read_text(encoding="utf-8").splitlines()
            about = (line[2:] for line in lines if line[:2] == "# " and line[2:3] != "@")
            yield Section(f"{group}={name}", " ".join(about), rows_of(path))


def _has(group: str, name: str, key: str) -> bool:
    """Return whether a choice of a group has the key, or one below it."""
    return any(f"{each}.".startswith(f"{group}.{key}.") for each in keys_of(group, name))


def _with_effect(row: Row, *, of_changes: bool = True) -> Row:
    """Return the row with its meaning, and the effect of a setting, on one line."""
    setting, meaning = row[0], row[1].partition(WHEN)[0]
    effect = effects_in_words(setting.partition("=")[0], of_changes=of_changes)
    return setting, f"{meaning} [{effect}]" if effect else meaning


def _refuse_unknown(word: str, choices: Mapping[str, Sequence[str]]) -> None:
    group, equals, value = word.partition("=")
    if equals and group in choices:
        for name in value.split(","):
            if name not in choices[group]:
                raise ConfigError(unknown_option(group, name, choices[group]))
    is_key = any(f"{key}.".startswith(f"{group}.") for key in keys_in_yaml())
    if group not in choices and not is_key:
        every = [f"{group}={name}" for group, several in choices.items() for name in several]
        chosen = next((each for each in every if each.endswith(f"={word}")), word)
        hint = did_you_mean(chosen, [*WORDS, *choices, *keys_in_yaml(), *every])
        raise ConfigError(
            f"{word}: --help takes a command, a key, or a choice such as model=convnet;"
            f" --help all shows every key.{hint}"
        )


def sections(path: Path) -> Iterator[Section]:
    """Yield the sections of config.yaml, each opened by a comment line, and their rows."""
    title, lines = "", list[str]()
    for line in path.read_text(encoding="utf-8").partition("\nhydra:")[0].splitlines():
        if line.startswith("# "):
            if title:
                yield Section(title, "", keys_with_meaning(lines))
            title, lines = line.removeprefix("# "), []
        lines.append(line)
    yield Section(title, "", keys_with_meaning(lines))


def rows_of(path: Path) -> list[Row]:
    """Return the settings of a choice with their meanings, which its own file need not repeat."""
    found = dict[str, Row]()
    for file in reversed([*lineage(path)]):
        lines = file.read_text(encoding="utf-8").splitlines()
        for row, meaning in keys_with_meaning(lines, f"{path.parent.name}."):
            last, said = found.get(key := row.partition("=")[0], (row, ""))
            found[key] = (last, said or meaning)
    return [*found.values()]


def keys_with_meaning(lines: Iterable[str], group: str = "") -> list[Row]:
    """Return `key=value` and its meaning of lines such as `key: value  # meaning`.

    Keys below an indented `key:` are dotted.
    """
    prefix, found = "", list[Row]()
    for line in lines:
        setting, _, meaning = line.partition("#")
        key, colon, value = setting.partition(":")
        if found and line.startswith(" ") and not setting.strip():  # a meaning's second line
            found[-1] = (found[-1][0], f"{found[-1][1]} {meaning.strip()}")
        if not colon or (group and (key in ("name", "defaults") or key.lstrip().startswith("-"))):
            continue
        prefix = prefix if key.startswith(" ") else ""
        if value.strip():
            found.append((f"{group}{prefix}{key.strip()}={value.strip()}", meaning.strip()))
        else:
            prefix = f"{key.strip()}."
    return found


def print_completions() -> None:
    """Print completions of the line in the environment of Hydra's completion script."""
    line = os.environ.get("COMP_LINE", "")
    is_python = os.path.basename(line.partition(" ")[0]).startswith("python")  # -m expt
    words = line.split(maxsplit=3 if is_python else 1)
    print("\n".join(completed(words[-1] if len(words) in (2, 4) else "")))


def completed(line: str) -> list[str]:
    """Return the words that the last one of `line` may become; a shell offers files for none."""
    typed = line.split() if line[-1:].strip() else [*line.split(), ""]
    *before, last = typed or [""]
    if before and before[0] in WORDS:
        return []
    words = [] if before else [word for word in WORDS if word.startswith(last)]
    return sorted({*words, *_settings_like(last)})


def _settings_like(word: str) -> list[str]:
    """Return completions of a setting: a key up to its next dot, or its values."""
    key, equals, _ = word.partition("=")
    if equals:
        values = (*choices_of(key), *options(key, *own_folders(None, [word])))
        found = dict.fromkeys(f"{key}={value}" for value in values)
    else:
        parts, depth = [each.split(".") for each in keys_in_yaml()], word.count(".") + 1
        found = dict.fromkeys(
            ".".join(each[:depth]) + ("=" if len(each) <= depth else ".") for each in parts
        )
    return [each for each in found if each.startswith(word)]
