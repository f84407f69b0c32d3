"""A run that is to be carried out: what, where, and what is said about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from expt.config import secrets
from expt.config.identity import Content
from expt.config.parse import parse_elsewhere
from expt.config.schema import RunConfig
from expt.machine import Machine
from expt.runs.paths import RunPaths
from expt.runs.result import Record

Split: TypeAlias = Literal["train", "val", "test", "all"]
"""What of a dataset is measured; `all` are its parts together."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Which weights are to be measured, and on what; see expt.worker.evaluation."""

    run: Path
    """The folder of the run that they are of."""
    which: Literal["best", "last"]
    split: Split
    own_data: bool
    """Whether the samples are those of the run itself."""
    dataset: str | None = None
    """What other samples are called."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """How far a run is tried out, of which nothing is to be kept; see expt.worker.preflight."""

    steps: int = 3
    """The first is slower than the others."""
    short_steps: int = 30
    """So many where they are short, and so vary more."""
    short_s: float = 0.02


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One run as it was asked for, however it will be carried out; see expt.launch.launcher."""

    config: RunConfig
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What `config` was parsed from; another machine parses it anew."""
    content: Content = field(default_factory=Content)
    """What the run is made of beside its settings."""
    paths: RunPaths
    about: Record
    """For result.json: what the run is called, and the words that ask for it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More variables for its workers."""
    typed_at: float | None = None
    """When this run alone was asked for [by time.monotonic]; None in a sweep, where its turn
    counts.
    """
    instead: Evaluation | Preflight | None = None
    """Where the run is not to be trained: what is done in place of that."""
    may_have_run: bool = False
    """Whether the folder may hold a record of this very run: of an earlier attempt, or of when it
    was refused.
    """

    goes_on_from: Path | None = None
    """The folder of this very run, only shorter, where its own has nothing yet to go on from."""

    until_epoch: int | None = None
    """The epoch after which the run pauses, evaluated and saved, though its schedule sees all its
    epochs.
    """

    @property
    def source(self) -> Path | None:
        """The other run's folder or checkpoint that the run resumes."""
        if self.config.resume not in (None, "auto"):
            return Path(str(self.config.resume))
        return self.goes_on_from

    @property
    def resumes(self) -> bool:
        """Whether the run is to go on from what it finds in its folder."""
        return self.may_have_run or self.config.resume == "auto"

    def next_attempt(self) -> int:
        """The number of the attempt that comes next, from 0."""
        return self.paths.next_attempt() if self.resumes else 0

    def to_send(self) -> dict[str, Any]:
        """The request for another process, in JSON, without what came from the environment; see
        `received`.
        """
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
    """What `RunRequest.to_send` was called on, by the environment of here.

    Raises ConfigError if it can't run here.
    """
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
