"""The identity of a run: a hash of all that can change its numbers: settings, data and code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from typing_extensions import TypedDict

from expt.config import keys, secrets
from expt.config.constraints import Key, names_of, plain, typed
from expt.config.groups import GROUPS
from expt.config.keys import flat
from expt.config.own_code import changed, frozen_in
from expt.config.schema import RunConfig

VERSION = 4
"""Part of every identity: raise it where equal settings no longer give equal numbers."""

REPEATED = keys.varying("repetition")
"""The keys by which runs differ that measure the same thing again."""
LENGTH = (*keys.varying("length"), "scheduler.kwargs.total_steps")
"""The keys by which a run differs from one that continues it."""
_FILES_OF = {"dataset": "data", "weights": "weights", "model": "base"}
"""The part of the content that a setting names the files of."""
PARTS = {
    "data": "dataset's files",
    "code": "own source",
    "weights": "first weights",
    "frozen": "frozen networks",
    "base": "published model's files",
}
"""The parts of the content in which two runs of equal settings may differ, in words."""


Rule = Literal["resume", "fork", "fork_within_epoch", "evaluate", "result"]
"""The purpose of comparing two runs: whether one may continue as the other, begin from it, measure
its weights, or has the same numbers."""


class Content(TypedDict, total=False):
    """Digests of the parts of a run other than its settings; None for a part that it lacks."""

    data: str | None
    """The digest of the dataset's files; see expt.data.fingerprint."""
    code: str | None
    """The digest of the source of custom classes; see expt.config.own_code."""
    weights: str | None
    """The checksum of the file that the first weights come from."""
    frozen: str | None
    """The digest of the files of frozen networks."""
    base: str | None
    """The digest of the files of a published model; see expt.models.published_files."""
    fork: str
    """The checkpoint that a fork begins from, as the identity of its run, @ and the step."""
    seedless_fork: str
    """The same with the seedless identity of that run."""


@dataclass(frozen=True)
class Identity:
    """Digests that are equal for two runs whose results are the same but for rounding."""

    digest: str
    seedless: str
    """The digest without the keys of REPEATED, and the values that follow them."""
    content: Content

    @classmethod
    def of(cls, config: RunConfig, content: Content) -> Identity:
        """Return the identity of a run with these settings."""
        return cls(digest(config, content), digest(config, content, but=REPEATED), content)


def changed_parts(then: Content, now: Content) -> list[str]:
    """Return the names of the parts that differ, but for the checkpoint of a fork."""
    return [part for part in PARTS if then.get(part) != now.get(part)]


def differences(then: Mapping[str, Any], config: RunConfig, now: Identity) -> dict[str, str]:
    """Return how the run of a record differs from one of these settings: data and choices first.

    Each key is a setting, or its part of the content, and the text has both values.
    """
    before, here = flat(then.get("config", {})), flat(shown(config))
    settings = differing(before, here, "result")
    settings.sort(key=lambda key: (not key.startswith("dataset."), not key.endswith(".name")))
    parts = changed_parts(then.get("content", Content()), now.content)
    if next(iter(settings), "").startswith("dataset."):  # which would give other data
        parts.clear()
    elif not (settings or parts) and changed(then):
        parts.append("code")
    found = {f"its {PARTS[part]}": f"its {PARTS[part]} changed since" for part in parts}
    for key in settings:
        short = key.removesuffix(".name")
        found[short] = f"{short}={typed(before.get(key))} there, {typed(here.get(key))} here"
    return found or {"its beginning": "it has another beginning, or is of another version of expt"}


def differing(then: Mapping[str, Any], now: Mapping[str, Any], rule: Rule) -> list[str]:
    """Return the keys of two flat settings (see `flat`) that differ although `rule` forbids it.

    Keys that change no number may always differ, and so may those without effect in both. Where
    another member of a group is chosen only its name is listed, e.g. `model.name`.
    """
    found = [
        key
        for key in sorted(then.keys() | now.keys())
        if not _equal(then.get(key), now.get(key))
        and not _allowed(keys.meaning_in(now if key in now else then, key), rule)
        and not (keys.is_idle(key, then) and keys.is_idle(key, now))
    ]
    chosen = {key.removesuffix("name") for key in found if key.endswith(".name")}
    return [
        key for key in found if key.endswith(".name") or key.partition(".")[0] + "." not in chosen
    ]


def _allowed(key: Key, rule: Rule) -> bool:
    by_rule = {"resume": key.resume is True, "evaluate": bool(key.evaluate), "result": False}
    by_rule |= {"fork": key.fork is not False, "fork_within_epoch": key.fork is True}
    return key.result != "changes" or by_rule[rule]


def _equal(one: Any, other: Any) -> bool:
    """Compare values; one may come from JSON, where a tuple is a list."""
    texts = (json.dumps(value, sort_keys=True, default=str) for value in (one, other))
    return bool(one == other) or len({*texts}) == 1


def digest(config: RunConfig, content: Content, *, but: Collection[str] = ()) -> str:
    """Return 12 hexadecimal digits for the settings that count, without the keys `but`.

    Without all of REPEATED the digest is seedless: a fork is of a seedless run, too, and values
    that follow those keys by an interpolation count as they are written.
    """
    settings = _settings_that_count(config)
    settings |= {f"dataset.{key}": text for key, text in config.dataset.counted_as.items()}
    found: dict[str, Any] = {**content}
    seedless_fork = found.pop("seedless_fork", None)
    is_seedless = {*REPEATED} <= {*but}
    if is_seedless:
        found["fork"] = seedless_fork
        settings = _as_written(settings, config.following)
        for part in {_FILES_OF.get(key.partition(".")[0], "") for key in config.following}:
            found.pop(part, None)
    if "frozen" in found:
        settings = without_places(settings)
    for part, value in found.items():
        if value:
            settings.pop(part, None)  # a path: the content there counts, wherever it lies
            settings[f"content.{part}"] = value
    if config.resume not in (None, "auto"):
        settings["resume"] = config.resume
    for key in but:
        settings.pop(key, None)
    text = json.dumps([VERSION, settings], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _settings_that_count(config: RunConfig) -> dict[str, Any]:
    """Return, flat, the settings that can change a run's numbers.

    Each key of a dictionary is one setting, whatever lies below it, so no two are mixed up.
    """
    every = [*_changing(config)]
    found = {key: value for key, value, _ in every}
    for key, _, only_if in every:
        if only_if and not keys.has_effect(only_if, found):
            del found[key]
    return found


def _changing(
    holder: Any, prefix: str = "", member: str | None = None
) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield the keys that change numbers, with their values and their conditions on others."""
    for name in names_of(cast(Any, type(holder))):
        key, value = f"{prefix}{name}", getattr(holder, name)
        cls, meant = type(value), keys.meaning(key, member)
        if meant.result != "changes":
            continue
        if hasattr(cls, "__dataclass_fields__"):
            group = value.name if not prefix and name in GROUPS else member
            yield from _changing(value, f"{key}.", group)
        elif cls is dict:
            yield from ((f"{key}.{below}", plain(value[below]), {}) for below in value)
        else:
            yield key, plain(value), meant.only_if


def without_places(settings: Mapping[str, Any]) -> Any:
    """Return settings without the names of frozen networks' weights, whose content counts."""
    return _as_written(settings, {key: "" for key, _ in frozen_in(settings)})


def _as_written(value: Any, texts: Mapping[str, str], path: str = "") -> Any:
    """Return settings with interpolations in place of their values, where `texts` has them."""
    if path in texts:
        return texts[path]
    if isinstance(value, Mapping):
        named = {key: f"{path}.{key}".removeprefix(".").replace(".kwargs.", ".") for key in value}
        return {key: _as_written(value[key], texts, named[key]) for key in value}
    if isinstance(value, list | tuple):
        return [_as_written(each, texts, f"{path}.{place}") for place, each in enumerate(value)]
    return value


def shown(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as it is written to disk: without values from the environment."""
    settings = {name: value for name, value in plain(config).items() if name != "secrets"}
    if not config.following:
        del settings["following"]
    hidden: dict[str, Any] = secrets.hidden(settings, config.secrets)
    return hidden


def hyperparameters(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return the settings that can change a run's numbers or their last digits, flat.

    The chosen member of a group has the group's own key: `model`, `optimizer.lr`.
    """
    settings = flat(settings)
    return {
        key if ".kwargs." in key else key.removesuffix(".name"): value
        if isinstance(value, bool | int | float | str)
        else str(list(value) if isinstance(value, tuple) else value)  # as in YAML and JSON
        for key, value in settings.items()
        if keys.meaning_in(settings, key).result != "none"
    }


def without_kwargs(key: str) -> str:
    """Return the key of a custom class's argument as it is typed: `model.width`."""
    return key.replace(".kwargs.", ".", 1)


def typed_hyperparameters(
    settings: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, bool | int | float | str]:
    """Return those that were typed or swept, as the record's `overrides` have them.

    Also the choices that are not settings, such as `experiment`.
    """
    every, given = hyperparameters(settings), flat(overrides)
    typed = {*given, *(f"{word.removesuffix('._target_')}.target" for word in given)}
    others = {
        word: str(value) for word, value in given.items() if word.partition(".")[0] not in settings
    }
    return others | {key: every[key] for key in every if without_kwargs(key) in typed}
