"""Overrides of a command: as Hydra and a shell take them, as a fork has them, as folders are named.

Free of Hydra, whose grammar they follow.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from expt.config import keys
from expt.config.constraints import in_quotes, quoted

NAMES_A_RUN = {"fork", "weights", "resume"}
"""Keys whose value is a path into a run's folder, which may have commas in its name."""
_NOT_INHERITED = {"resume", "fork", "weights", "sweep", "hydra"}
"""Keys that say where a run begins, or that it is one of a grid."""
MAX_NAME_BYTES = 180
"""The longest name of a run's folder: file systems take 255, and a suffix and `.tmp` need room."""


def unquoted(text: str) -> str:
    """Return the value that `text` stands for in that grammar, where it is one text."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        # 'a\\\'b' as a\'b: of backslashes before a quote or the end half are left, rounded down.
        return re.sub(rf"(\\*)\1\\?(?={text[0]}|\Z)", r"\1", text[1:-1])
    # Signs that Hydra escapes in each of several values.
    return re.sub(r"\\([\\()[\]{}:=, \t])", r"\1", text)


def joined(words: Iterable[str]) -> str:
    """Return the words for a shell."""
    return " ".join(map(in_quotes, words))


def words_after_expt(command: str) -> list[str] | None:
    """Return the words of a command after `python -m expt` or `expt`; None for a script's."""
    words = shlex.split(command)
    if words[:2] == ["python", "-m"]:
        words = words[2:]
    return words[1:] if words[:1] == ["expt"] else None


def setting_word(key: str, value: object) -> str:
    """Return `key=value` for a shell."""
    return joined([f"{key}={quoted(value)}"])


def key_of(word: str) -> str:
    """Return the key of a word such as `+optimizer.lr=0.1`."""
    return word.partition("=")[0].lstrip("+~")


def is_resume_auto(word: str) -> bool:
    """Return whether the word says only that a run continues in its own folder."""
    return key_of(word) == "resume" and unquoted(word.partition("=")[2]) == "auto"


def values_of(text: str) -> list[str]:
    """Return the values between commas; parts that together name a run, as `s/a=1,b=2`, are one."""
    parts = text.split(",")
    found = list[str]()
    if all(map(_is_there, parts)):
        return parts
    while parts:
        end = next((end for end in range(len(parts), 1, -1) if _is_there(",".join(parts[:end]))), 1)
        found.append(",".join(parts[:end]))
        parts = parts[end:]
    return found


def _is_there(given: str) -> bool:
    """Return whether `given` names a file or a folder, or a checkpoint of one."""
    try:
        path = Path(unquoted(given))
        folder, at, _ = path.name.rpartition("@")
        return path.exists() or (bool(at) and path.with_name(folder).exists())
    except (OSError, ValueError):  # too long, or no path at all
        return False


def inherited(arguments: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Return the words of a run's command that its fork has too, next to those `typed`.

    Keys of a group whose choice is typed are left out: they may not be there.
    """
    replaced = {key_of(word) for word in typed if not _names_keys(word)} | _NOT_INHERITED

    def is_inherited(word: str) -> bool:
        return not {key_of(word), re.split(r"[./]", key_of(word))[0]} & replaced

    return for_strategy(filter(is_inherited, arguments), typed)


def _names_keys(word: str) -> bool:
    """Return whether the word changes only the keys that it names, and leaves others."""
    return word.partition("=")[2].lstrip().startswith("{") and "_target_" not in word


def for_strategy(words: Iterable[str], typed: Iterable[str]) -> list[str]:
    """Return the `words` of an earlier command without those that the `typed` strategy ignores."""
    given = [unquoted(word.partition("=")[2]) for word in typed if key_of(word) == "strategy"]
    if not given:
        return list(words)

    def has_effect(word: str) -> bool:
        wanted = keys.meaning(key_of(word)).only_if.get("strategy", given[-1])
        return given[-1] in (wanted if isinstance(wanted, tuple) else (wanted,))

    return list(filter(has_effect, words))


def folder_names(points: Sequence[Sequence[str]], swept: Collection[str] = ()) -> list[str]:
    """Return a name for each run, of the settings that differ: `lr=0.1,model=mlp`.

    `swept` are keys that vary, whether or not they do among these. Equal names are equal runs.
    """
    settings = [dict[str, str]() for _ in points]
    for found, point in zip(settings, points, strict=True):
        for key, value in map(_key_and_value, point):  # a key may have two mappings
            found[key] = f"{found[key]},{value}" if key in found else value
    given = list(dict.fromkeys(key for point in settings for key in point))
    varied = [
        key for key in given if key in swept or len({point.get(key) for point in settings}) > 1
    ]
    # `lr` of `optimizer.lr`, and `betas.1` of `optimizer.betas.1`, unless another is called so.
    last = {key: re.split(r"\.(?!\d+(?:\.|$))", key)[-1] for key in varied or given}
    ends = [*last.values()]
    short = {key: end if ends.count(end) == 1 else key for key, end in last.items()}
    return [run_name({name: p[key] for key, name in short.items() if key in p}) for p in settings]


def run_name(settings: Mapping[str, str]) -> str:
    """Return a name for a folder; one that a file system would not take is changed, and unique."""
    text = ",".join(f"{key}={value}" for key, value in sorted(settings.items()))
    name = re.sub(r"[^\w.,=+\-\[\]]", "_", text)
    while len(name.encode()) > MAX_NAME_BYTES:
        name = name[:-1]
    if name != text:  # two texts may have become one
        name = f"{name},{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    return name or "run"


def _key_and_value(override: str) -> tuple[str, str]:
    """Return a setting as a name has it: `Net(width:8)` for `{_target_: mine.Net,width:8}`."""
    value = override.partition("=")[2]
    if own := re.fullmatch(r"\{\s*_target_:\s*[\w.]*?(\w+)\s*(?:,(.*))?\}", value, re.DOTALL):
        name, arguments = own.groups()
        return key_of(override), f"{name}({arguments})" if arguments else name
    return key_of(override), unquoted(value)
