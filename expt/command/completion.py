"""The words that the Tab key offers, for Hydra's script for a shell."""

from __future__ import annotations

import os

from expt.command.conf_files import keys_in_yaml, options, own_folders
from expt.command.words import WORDS
from expt.config.key_types import choices_of


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
    return sorted({*words, *_settings(last)})


def _settings(word: str) -> list[str]:
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
