"""The request for a run."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from expt.config import secrets
from expt.config.identity import Identity
from expt.config.parse import parse, recorded, settings_of
from expt.config.schema import RunConfig
from expt.features import Features
from expt.machine import Machine
from expt.runs.named_checkpoint import trained_run
from expt.runs.paths import RunPaths
from expt.runs.result import Record

Split: TypeAlias = Literal["train", "val", "test", "all"]
"""The split of a dataset that is measured; `all` are all of them together."""


class Trained(NamedTuple):
    """A trained run that is used."""

    run: Path
    """The folder of the run that wrote the weights."""
    which: str
    """The checkpoint: best, last, or as after RUN@."""
    config: RunConfig
    """The settings with which it is used."""
    record: Record

    @classmethod
    def read(cls, run: Path, which: str) -> Trained:
        """Return the run of a folder, with its own settings. Raises as `trained_run`."""
        record, _ = trained_run(run, which)
        return cls(run, which, recorded(record["config"]), record)

    @property
    def label(self) -> str:
        """The run's absolute folder, with a checkpoint that is not its best as `RUN@last`."""
        return str(self.run.absolute()) + (f"@{self.which}" if self.which != "best" else "")

    @property
    def features(self) -> Features:
        """The features of the samples that it was trained on."""
        return Features.read(self.record["data"])


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The weights to measure, and the samples; see expt.worker.evaluation."""

    runs: Sequence[Trained]
    """The runs; of several the mean is measured."""
    flips: bool
    """True if the mean is also over mirror images."""
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
    shorter: Path | None = None
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
        return self.shorter

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
            "shorter": self.shorter and str(self.shorter.resolve()),
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
        shorter=Path(sent["shorter"]) if sent["shorter"] else None,
        until_epoch=sent["until_epoch"],
    )
