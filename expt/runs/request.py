"""The request for a run: what to do, where, and what its record says about it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from expt.config import secrets
from expt.config.identity import Content
from expt.config.parse import parse_elsewhere
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
    which: Literal["best", "last"]
    split: Split
    own_data: bool
    """Whether the samples are those of the run itself."""
    dataset: str | None = None
    """The name of other samples."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """How far to try a run, of which nothing is kept; see expt.worker.evaluation."""

    steps: int = 3
    """The first is slower than the others."""
    short_steps: int = 30
    """So many where they are short, and so vary more."""
    short_s: float = 0.02


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
    content: Content = field(default_factory=Content)
    """What the run is made of besides its settings."""
    paths: RunPaths
    about: Record
    """For result.json: the name of the run, and the words of its command."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More variables for its workers."""
    typed_at: float | None = None
    """When the command of a single run was typed [by time.monotonic]; None in a sweep."""
    instead: Evaluation | Preflight | None = None
    """What is done in place of training."""
    may_have_run: bool = False
    """Whether the folder may hold a record of this very run, of an earlier attempt."""
    goes_on_from: Path | None = None
    """The folder of a shorter run of the same settings, to resume if its own has no checkpoint."""
    until_epoch: int | None = None
    """The epoch after which the run pauses; its schedule has all its epochs."""

    @property
    def source(self) -> Path | None:
        """The other run's folder or checkpoint that the run resumes."""
        if self.config.resume not in (None, "auto"):
            return Path(str(self.config.resume))
        return self.goes_on_from

    @property
    def resumes(self) -> bool:
        """Whether the run continues from what it finds in its folder."""
        return self.may_have_run or self.config.resume == "auto"

    def next_attempt(self) -> int:
        """Return the number of the next attempt, from 0."""
        return self.paths.next_attempt() if self.resumes else 0

    def to_send(self) -> dict[str, Any]:
        """Return the request for another process, in JSON, without secrets; see `received`."""
        folder = str(self.paths.folder.resolve())
        begins = (
            {} if self.goes_on_from is None else {"goes_on_from": str(self.goes_on_from.resolve())}
        )
        pauses = {} if self.until_epoch is None else {"until_epoch": self.until_epoch}
        settings = {key: value for key, value in self.settings.items() if key != "secrets"}
        return {
            **secrets.hidden({"folder": folder, "about": self.about, "env": self.env}),
            "settings": secrets.hidden(settings, self.config.secrets),
            "may_have_run": self.may_have_run,
            "content": self.content._asdict(),
            **begins,
            **pauses,
        }


def received(sent: Mapping[str, Any], machine: Machine, *, typed_at: float) -> RunRequest:
    """Return the request that `RunRequest.to_send` has sent. Raises ConfigError if it can't run."""
    return RunRequest(
        config=parse_elsewhere(sent["settings"], machine),
        settings=sent["settings"],
        content=Content(**sent["content"]),
        paths=RunPaths(Path(sent["folder"])),
        about=sent["about"],
        env=secrets.restored(sent["env"]),
        typed_at=typed_at,
        may_have_run=sent["may_have_run"],
        goes_on_from=Path(sent["goes_on_from"]) if "goes_on_from" in sent else None,
        until_epoch=sent.get("until_epoch"),
    )
