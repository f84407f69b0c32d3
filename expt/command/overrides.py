"""What a person typed for a run: as keys and values, and as a folder's name."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from expt.runs.paths import make_unused_folder
from expt.runs.result import Record
from expt.runs.typed import unquoted

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override

MAX_NAME_BYTES = 180  # file systems take 255; leaves room for a suffix and for .tmp beside it


def as_dict(overrides: Sequence[str]) -> dict[str, Any]:
    """From `["model=mlp", "optimizer.lr=0.1"]` to keys and values."""
    return {key_typed(override): override.value() for override in parsed(overrides)}


def key_typed(override: Override) -> str:
    """The key, or the group with where its choice goes, as `aug@model.opts`."""
    return (
        override.key_or_group
        if override.package is None
        else f"{override.key_or_group}@{override.package}"
    )


def about_run(name: str, overrides: Sequence[str]) -> Record:
    """The fields of result.json that say what the run is called, and how to ask for it again."""
    settings = [
        word for word in overrides if word != "resume=auto"
    ]  # which tells no run from another
    return {"name": name, "overrides": as_dict(settings), "arguments": list(overrides)}


def typed_in(hydra: Any) -> list[str]:
    """The words of a command, by Hydra's own part of what it composed; a `${KEY}` in them stays
    what was typed.

    To read them one by one would give the value that KEY has there, and not in the run.
    """
    from omegaconf import OmegaConf  # late, as below

    return [str(word) for word in OmegaConf.to_container(hydra.overrides.task, resolve=False) or ()]


def of_named_grid(composed: Any) -> list[str]:
    """The words of the grid that a file of `conf/sweep` has named."""
    from omegaconf import OmegaConf  # late, as below

    params = OmegaConf.select(composed, "hydra.sweeper.params") or {}
    return [f"{key}={value}" for key, value in params.items()]


def swept_keys(overrides: Sequence[str]) -> list[str]:
    """The keys that have several values: `model=mlp,convnet`, `seed=range(3)`."""
    return [key_typed(override) for override in parsed(overrides) if override.is_sweep_override()]


def named_values(word: str) -> list[str]:
    """The words for each of several values of a key, `mlp` and `convnet` of `model=mlp,convnet`;
    else none.

    Those that a pattern stands for are Hydra's to look up.
    """
    from hydra.core.override_parser.types import ValueType  # late, as below

    if "," not in word or not is_readable(word):
        return []
    (override,) = parsed([word])
    named = override.value_type in (ValueType.SIMPLE_CHOICE_SWEEP, ValueType.CHOICE_SWEEP)
    return [*override.sweep_string_iterator()] if named else []


def parsed(overrides: Sequence[str]) -> list[Override]:
    """The words by Hydra's grammar. Raises OverrideParseException."""
    from expt.command.hydra_words import simple  # late, as below

    return [simple(word) or _parser().parse_overrides([word])[0] for word in overrides]


def last_of_each(words: Sequence[str]) -> list[Override]:
    """Of several words for a key the last, in its place; where the one before had a `+`, it has one
    too.
    """
    last: dict[str, Override] = {}
    for override in parsed(words):
        typed = override.get_key_element()
        key = typed.lstrip("+~")
        before = last.pop(key, override).get_key_element()
        is_added = before.startswith("+") and typed == key
        last[key] = (
            parsed([before.removesuffix(key) + str(override.input_line)])[0]
            if is_added
            else override
        )
    return [*last.values()]


@functools.cache  # it takes 0.5 ms to make one
def _parser() -> OverridesParser:
    from hydra.core.override_parser.overrides_parser import (
        OverridesParser,
    )  # late: not for `expt rerun --help`

    return OverridesParser.create()


def is_readable(override: str) -> bool:
    """Whether Hydra's grammar has a reading for it."""
    from hydra.errors import OverrideParseException

    try:
        parsed([override])
    except OverrideParseException:
        return False
    return True


def folder_names(points: Sequence[Sequence[str]], swept: Collection[str] = ()) -> list[str]:
    """A name for each point, of the settings in which the points differ: `lr=0.1,model=mlp`.

    `swept` are keys that vary, whether or not they do among these points. Equal names are equal
    points."""
    settings = [dict(_split(override) for override in point) for point in points]
    given = list(dict.fromkeys(key for point in settings for key in point))
    varied = [
        key for key in given if key in swept or len({point.get(key) for point in settings}) > 1
    ]
    keys = varied or given
    short = _short_keys(keys)
    return [
        run_name({short[key]: point[key] for key in keys if key in point}) for point in settings
    ]


def run_name(settings: Mapping[str, str]) -> str:
    """A folder's name that says what differs; one that a file system would not take is mended, and
    kept unique.
    """
    text = ",".join(f"{key}={value}" for key, value in sorted(settings.items()))
    name = re.sub(r"[^\w.,=+\-\[\]]", "_", text)
    while len(name.encode()) > MAX_NAME_BYTES:
        name = name[:-1]
    if name != text:  # two texts may have become one
        name = f"{name},{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    return name or "run"


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.lstrip("+~").partition("=")
    # Of an own class the last part of its name, and its arguments.
    own = re.fullmatch(r"\{\s*_target_:\s*([\w.]*?)(\w+)\s*(?:,(.*))?\}", value, re.DOTALL)
    return key, (f"{own[2]}({own[3]})" if own[3] else own[2]) if own else unquoted(value)


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """`optimizer.lr` is `lr`, unless another key would be `lr` too."""
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)
    }


def register_resolvers() -> None:
    """Let YAML say `${unused_folder:NAME}`, a folder made just now, and `${run_name:OVERRIDES}`, a
    name for a run.
    """
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver(
        "run_name", lambda overrides: folder_names([list(overrides)])[0], replace=True
    )
    OmegaConf.register_new_resolver(
        "unused_folder", make_unused_folder, use_cache=True, replace=True
    )
