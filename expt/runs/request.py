"""The request for a run, and the overrides of its command, as Hydra and a shell take them."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from expt.config import secrets
from expt.config.identity import Identity
from expt.config.parse import parse, settings_of
from expt.config.schema import RunConfig
from expt.machine import Machine
from expt.runs.paths import RunPaths
from expt.runs.result import Record

Split: TypeAlias = Literal["train", "val", "test", "all"]
"""The split of a dataset that is measured; `all` are all of them together."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The weights to measure, and the samples; see expt.worker.evaluation."""

    run: Path
    """The folder of the run that wrote the weights."""
    which: str
    """The checkpoint: best, last, or as after RUN@."""
    split: Split
    own_data: bool
    """True if the samples are those of the run itself."""
    dataset: str | None = None
    """The name of other samples."""


class Meeting(NamedTuple):
    """The port at which the workers of one machine find one another; their driver holds it."""

    port: int
    listener: socket.socket | None
    """The socket that holds the port, for the one worker that serves it."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One run, however it will be carried out; see expt.launch.launcher."""

    config: RunConfig
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The settings that `config` was parsed from; another machine parses them again."""
    identity: Identity
    paths: RunPaths
    about: Record
    """The name of the run and the words of its command, for result.json."""
    hydra: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The text of each file of `.hydra`; none where something else writes it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More variables for its workers."""
    typed_at: float | None = None
    """When the command was typed [by time.monotonic]; None for a sweep's run until its turn."""
    instead: Evaluation | Literal["preflight"] | None = None
    """A replacement for training; a preflight keeps nothing."""
    may_have_run: bool = False
    """True if the folder may hold a record of an earlier attempt at this run."""
    goes_on_from: Path | None = None
    """The folder of a shorter run of the same settings, to resume if its own has no checkpoint."""
    until_epoch: int | None = None
    """The epoch after which the run pauses; its schedule has all its epochs."""

    @property
    def waited_since(self) -> float:
        """When a person began to wait for the first step, by the clock of `typed_at`."""
        assert self.typed_at is not None, "its turn has not come"
        return self.typed_at

    @property
    def source(self) -> Path | None:
        """The other run's folder or checkpoint that the run resumes."""
        if self.config.resume not in (None, "auto"):
            return Path(str(self.config.resume))
        return self.goes_on_from

    @property
    def resumes(self) -> bool:
        """True if the run continues from its own folder."""
        return self.may_have_run or self.config.resume == "auto"

    def next_attempt(self) -> int:
        """Return the number of the next attempt, from 0."""
        return self.paths.next_attempt() if self.resumes else 0

    def to_send(self) -> dict[str, Any]:
        """Return the request for another process, in JSON, without secrets; see `received`."""
        folder = str(self.paths.folder.resolve())
        settings = {key: value for key, value in self.settings.items() if key != "secrets"}
        return {
            **secrets.hidden({"folder": folder, "about": self.about, "env": self.env}),
            "settings": secrets.hidden(settings, self.config.secrets),
            "may_have_run": self.may_have_run,
            "identity": asdict(self.identity),
            "goes_on_from": self.goes_on_from and str(self.goes_on_from.resolve()),
            "until_epoch": self.until_epoch,
        }


def received(sent: Mapping[str, Any], machine: Machine, *, typed_at: float) -> RunRequest:
    """Return the request that `RunRequest.to_send` has sent. Raises ConfigError if it can't run."""
    return RunRequest(
        config=parse(settings_of(sent["settings"]), machine),
        settings=sent["settings"],
        identity=Identity(**sent["identity"]),
        paths=RunPaths(Path(sent["folder"])),
        about=sent["about"],
        env=secrets.restored(sent["env"]),
        typed_at=typed_at,
        may_have_run=sent["may_have_run"],
        goes_on_from=Path(sent["goes_on_from"]) if sent["goes_on_from"] else None,
        until_epoch=sent["until_epoch"],
    )


NAMES_A_RUN = {"fork", "weights", "resume"}
"""Keys whose value is a path into a run's folder, which may have commas in its name."""
_NOT_INHERITED = {"resume", "fork", "weights", "sweep", "hydra"}
"""Keys that say where a run begins, or that it is one of a grid."""
_SHARDED = ("fsdp", "hsdp")
_OF_SHARDS = ("sharding", "checkpoint.sharded")
_OF_DDP = ("ddp.find_unused_parameters", "ddp.static_graph")
"""Keys of the strategies of one kind, which those of the other refuse."""
_OTHER_THAN_TEXT = {"null", "true", "false", "inf", "nan"}
_IN_QUOTES = re.compile(r'["$`!\\]')
"""The characters that a shell reads between double quotes."""


def quoted(value: object) -> str:
    """Return `value` as Hydra's command-line grammar takes it."""
    text = str(value)
    if (
        re.fullmatch(r"[A-Za-z./][\w./+-]*", text, re.ASCII)
        and text.lower() not in _OTHER_THAN_TEXT
    ):
        return text
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


def literal(value: object) -> str:
    """Return a value of any kind that a record has, as that grammar takes it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(literal, value))}]"
    if isinstance(value, str):
        return quoted(value)
    return "null" if value is None else str(value).lower()


def unquoted(text: str) -> str:
    """Return the value that `text` stands for in that grammar, where it is one text."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        quote = text[0]
        return re.sub(
            rf"(\\+)({quote}|$)",
            lambda found: found[1][: len(found[1]) // 2] + found[2],
            text[1:-1],
        )
    # Signs that Hydra escapes in each of several values.
    return re.sub(r"\\([\\()[\]{}:=, \t])", r"\1", text)


def joined(words: Iterable[str]) -> str:
    """Return the words for a shell; those that have quotes of their own get double ones."""
    return " ".join(
        f'"{word}"' if "'" in word and not _IN_QUOTES.search(word) else shlex.quote(word)
        for word in words
    )


def setting_word(key: str, value: object) -> str:
    """Return `key=value` for a shell."""
    return joined([f"{key}={quoted(value)}"])


def key_of(word: str) -> str:
    """Return the key of a word such as `+optimizer.lr=0.1`."""
    return word.partition("=")[0].lstrip("+~")


def values_of(text: str) -> list[str]:
    """Return the values between commas; parts that together name a run, as `s/a=1,b=2`, are one."""
    parts, found = text.split(","), list[str]()
    if all(map(is_there, parts)):
        return parts
    while parts:
        end = next((end for end in range(len(parts), 1, -1) if is_there(",".join(parts[:end]))), 1)
        found.append(",".join(parts[:end]))
        parts = parts[end:]
    return found


def is_there(given: str) -> bool:
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
    keys = {*map(key_of, typed)} | _NOT_INHERITED
    mappings = {key_of(word) for word in typed if _names_keys(word)}

    def is_inherited(word: str) -> bool:
        names = {key_of(word), re.split(r"[./]", key_of(word))[0]}
        return not (names - mappings if _names_keys(word) else names) & keys

    return for_strategy(list(filter(is_inherited, arguments)), arguments, typed)


def _names_keys(word: str) -> bool:
    """Return whether the word changes only the keys that it names, and leaves others."""
    return word.partition("=")[2].lstrip().startswith("{") and "_target_" not in word


def for_strategy(words: Sequence[str], before: Collection[str], typed: Sequence[str]) -> list[str]:
    """Return the `words` without settings that the `typed` strategy cannot have.

    Of `before`, the words of the run that is continued, they were of another strategy.
    """
    strategy = _strategy(typed)
    if strategy is None:
        return list(words)
    foreign: tuple[str, ...] = _OF_DDP if strategy in _SHARDED else _OF_SHARDS
    if strategy == "fsdp" or (strategy == "hsdp" and _strategy(before) == "fsdp"):
        foreign += ("sharding.shards",)
    return [word for word in words if not key_of(word).startswith(foreign)]


def _strategy(words: Iterable[str]) -> str | None:
    found = [unquoted(word.partition("=")[2]) for word in words if key_of(word) == "strategy"]
    return found[-1] if found else None
