"""What a shell offers for a command that is being typed: subcommands, settings, their values."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from expt.command.conf_files import conf_dir, conf_here, groups, keys
from expt.command.words import WORDS
from expt.config.keys import choices_of


def print_completions() -> None:
    """Print what the line in the environment of Hydra's completion script may become."""
    line = os.environ.get("COMP_LINE", "")
    words = line.split(maxsplit=3 if line.startswith("python") else 1)
    print("\n".join(completed(words[-1] if len(words) in (2, 4) else "")))


def completed(line: str) -> list[str]:
    """Return the words that the last one of `line` may become; a shell offers files for none."""
    typed = line.split() if line[-1:].strip() else [*line.split(), ""]
    *before, last = typed or [""]
    if before and before[0] in WORDS:
        if before[0] != "evaluate" or len(before) == 1:
            return []
        return sorted(
            word for word in _settings(last) + _of_evaluations(last) if _is_measured(word)
        )
    words = [] if before else [word for word in WORDS if word.startswith(last)]
    return sorted({*words, *_settings(last)})


def _settings(word: str) -> list[str]:
    """Return what a setting may become: a key up to its next dot, or its values."""
    key, equals, _ = word.partition("=")
    if equals:
        values: Iterable[str] = [*choices_of(key), *_options(key)]
        return [
            each
            for each in dict.fromkeys(f"{key}={value}" for value in values)
            if each.startswith(word)
        ]
    depth = word.count(".") + 1
    found = dict.fromkeys(".".join(each.split(".")[:depth]) for each in keys())
    known = {*keys()}
    whole = [f"{each}=" for each in found if each in known]
    leading = [f"{each}." for each in found if any(key.startswith(f"{each}.") for key in known)]
    return [each for each in [*whole, *leading] if each.startswith(word)]


def _options(group: str) -> list[str]:
    own = conf_here([f"{group}="])
    folders = [conf_dir(), *([Path(own)] if own else [])]
    files = (path for folder in folders for path in (folder / group).glob("*.yaml"))
    return [path.stem for path in files] if group in groups() or own else []


def _of_evaluations(word: str) -> list[str]:
    from expt.command.evaluation_settings import CHOICES  # late: Hydra

    choices = (f"{key}={choice}" for key, several in CHOICES.items() for choice in several)
    return [each for each in choices if each.startswith(word)]


def _is_measured(word: str) -> bool:
    """Return whether an evaluation takes this setting."""
    from expt.command.evaluation_settings import TYPED  # late: Hydra

    key = word.partition("=")[0]
    leads_to_one = key[-1:] == "." and any(each.startswith(key) for each in TYPED)
    return key in TYPED or key.startswith("dataset.") or leads_to_one
