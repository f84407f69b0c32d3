"""What a shell offers for a command that is being typed: expt's words, settings, and their values."""

from __future__ import annotations

from collections.abc import Callable

from expt.command.words import WORDS
from expt.config.choices import choices_of


def completed(line: str, composed: Callable[[str], list[str]]) -> list[str]:
    """The words that the last one of `line` may become; `composed` has Hydra's of a line of
    settings.

    Where there are none, a shell offers files.
    """
    typed, ended = line.split(), not line or line[-1].isspace()
    if typed and typed[0] in WORDS and (len(typed) > 1 or ended):
        num_words = 2 if typed[0] == "evaluate" else len(typed) + 1  # before settings
        if len(typed) + ended <= num_words:
            return []
        return _of_an_evaluation(typed[num_words:], composed, ended=ended)
    found = _settings(line, composed)
    first = typed[0] if typed else ""
    return (
        sorted([*found, *(word for word in WORDS if word.startswith(first))])
        if len(typed) + ended <= 1
        else found
    )


def _settings(line: str, composed: Callable[[str], list[str]]) -> list[str]:
    """Of a setting Hydra knows the present value alone."""
    word = "" if line[-1:].isspace() else line.rpartition(" ")[2]
    key, equals, _ = word.partition("=")
    values = (f"{key}={value}" for value in choices_of(key)) if equals else ()
    return sorted({*composed(line), *(value for value in values if value.startswith(word))})


def _of_an_evaluation(
    typed: list[str], composed: Callable[[str], list[str]], *, ended: bool
) -> list[str]:
    from expt.command.evaluation_settings import CHOICES  # late: Hydra

    whole, last = (typed, "") if ended else (typed[:-1], typed[-1])
    known = [
        word for word in whole if word.partition("=")[0] not in CHOICES
    ]  # which Hydra does not know
    found = [word for word in _settings(" ".join([*known, last]), composed) if _is_measured(word)]
    choices = (f"{key}={choice}" for key, several in CHOICES.items() for choice in several)
    return [*found, *(word for word in choices if word.startswith(last))]


def _is_measured(word: str) -> bool:
    """Whether an evaluation takes this setting."""
    from expt.command.evaluation_settings import TYPED  # late: Hydra

    key = word.partition("=")[0]
    leads_to_one = key[-1:] == "." and any(each.startswith(key) for each in TYPED)
    return key in TYPED or key.startswith("dataset.") or leads_to_one
