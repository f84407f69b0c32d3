"""A try at a run: its record begun, and kept true to its end."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from expt.config import main_code
from expt.config.identity import REPEATED, Content, identity, shown
from expt.config.schema import RunConfig
from expt.errors import ConfigError, ExptError, Interrupted, warn
from expt.runs import checkpoint_file, fork, lineage, provenance, resume, spending, undo
from expt.runs.folder_lock import FolderLock, at_work
from expt.runs.paths import RunPaths
from expt.runs.request import RunRequest
from expt.runs.result import (
    FAILED,
    INTERRUPTED,
    PAUSED,
    RUNNING,
    STATUSES,
    Made,
    Record,
    create_result,
    read_result,
    so_far,
    update_result,
)
from expt.runs.weights_file import begun_from


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try at carrying out a request; there are more where workers fail, or the run is resumed."""

    request: RunRequest
    number: int = 0
    started_at: float
    """When the run's turn came [by time.monotonic]."""
    devices: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them; none is the CPU."""
    lock: FolderLock | None = None
    """That of the run's folder, for the workers to hold too."""

    @property
    def waited_since(self) -> float:
        """From when on a person waits for the first step: the command, or in a sweep the run's
        turn.

        By time.monotonic, as all that lasts: the machine's clock may be set. It is the same in all
        processes."""
        return self.started_at if self.request.typed_at is None else self.request.typed_at

    @property
    def paths(self) -> RunPaths:
        """The files of the run."""
        return self.request.paths

    def begin(self, port: int | None = None) -> Path | None:
        """Write the first result.json of the run, or of this attempt; returns the checkpoint to
        resume from.

        Raises ConfigError if its folder holds another run, or the checkpoint is another's.
        """
        resumes = self.request.resumes or self.number > 0
        if resumes:
            self._refuse_foreign()
        forks = self._forks(resumes=resumes)
        source = self._checkpoint(resumes=resumes, forks=forks)
        if resumes and source is None:
            self.paths.clear_records()
        undo.accept(self.paths) if source is None else undo.keep(self.paths)
        record = self._first_record(
            port, source if forks else None, read_result(self.paths) if source else {}
        )
        try:
            create_result(self.paths, may_exist=resumes, **record)
        except FileExistsError:
            folder = self.paths.folder
            undo.accept(self.paths)
            raise ConfigError(
                f"hydra.run.dir={folder}: holds a run already; choose another folder"
            ) from None
        main_code.keep(self.request.config, self.paths.code)
        if source is None:
            return None
        if forks:
            return fork.begin(source, self.request.config, self.paths)
        update_result(self.paths, resumed_from=resume.cut_back(source, self.paths))
        if self.request.until_epoch is not None and source.parent != self.paths.checkpoints:
            self._take_in(source)
        return source

    def _take_in(self, source: Path) -> None:
        """Have the other run's checkpoint as one's own: one may pause before one has written any."""
        self.paths.checkpoints.mkdir(parents=True, exist_ok=True)
        checkpoint_file.keep_as(source, self.paths.last)

    def _refuse_foreign(self) -> None:
        """Raise ConfigError where nothing says that numbers are a run's: to begin anew would remove
        them.
        """
        paths, record = self.paths, read_result(self.paths)
        refused = record.get("status") in STATUSES and not paths.metrics.exists()
        if "identity" in record or refused or paths.checkpoints.exists():
            return
        theirs = next(
            (path for path in (paths.metrics, *paths.event_files()) if path.exists()), None
        )
        if theirs:
            raise ConfigError(
                f"{theirs}: no {paths.result.name} beside it says that it is a run's; move it away,"
                " or choose another folder by hydra.run.dir=FOLDER"
            )

    @contextlib.contextmanager
    def recorded(self, on_start: Callable[[], None] | None = None) -> Iterator[Path | None]:
        """Keep result.json true while the run trains in this process; gives the checkpoint to
        resume from.

        `on_start` is called once the run has been accepted.
        """
        source = self.begin()
        if on_start:
            on_start()
        try:
            yield source
        except BaseException as error:
            record_end(self.paths, error)
            raise

    def _checkpoint(self, *, resumes: bool, forks: bool) -> Path | None:
        config, paths = self.request.config, self.paths
        ran = resumes and (paths.checkpoints.exists() or paths.metrics.exists())
        begins = self.request.goes_on_from
        if forks:
            return fork.find(config, self.request.content, paths)
        if not ran and config.resume in (None, "auto") and begins is None:
            return None
        return resume.find(
            config, self.request.content, paths, may_have_run=resumes, else_from=begins
        )

    def _forks(self, *, resumes: bool) -> bool:
        """Whether it begins from another run's checkpoint, with settings of its own: it has none of
        its own yet.
        """
        config, paths = self.request.config, self.paths
        own = paths.checkpoints.glob(f"{paths.last.stem}*")
        whole = resumes and any(
            path.suffix == paths.last.suffix or ".corrupt" in path.name for path in own
        )
        return (
            bool(config.fork)
            and not whole
            and config.resume in (None, "auto")
            and not self.request.goes_on_from
        )

    def _lineage(self, forked: Path | None, earlier: Record) -> tuple[Content, Record]:
        """`forked` is the checkpoint of another run that this one is a fork of, and has none of its
        own yet.
        """
        config, content = self.request.config, self.request.content
        then = earlier or lineage.record_of_resumed(config, self.request.goes_on_from)
        begun: Record = {}
        if config.weights is not None:
            if "content" in earlier:
                content = content._replace(
                    weights=earlier["content"].get("weights", content.weights)
                )
            begun = {
                "weights_from": (
                    then.get("weights_from") or begun_from(config.weights, content.weights)
                )
            }
        if forked is not None and forked != self.paths.forked:
            begun["forked_from"] = fork.forked_from(config, forked)
        elif "forked_from" in then:
            made = then["content"]
            content = content._replace(
                fork=made.get("fork"), seedless_fork=made.get("seedless_fork")
            )
            begun["forked_from"] = then["forked_from"]
        return content, begun

    def _first_record(self, port: int | None, forked: Path | None, earlier: Record) -> Record:
        """`earlier` is what the run that goes on here has said: where it comes from does not
        change.
        """
        config, host = self.request.config, socket.gethostname()
        content, begun = self._lineage(forked, earlier)
        if self.request.until_epoch is not None:
            begun["until_epoch"] = self.request.until_epoch
        return {
            **begun,
            **spending.at_start(
                self.devices, read_result(self.paths) if self.request.resumes else {}
            ),
            "started": time.time() - (time.monotonic() - self.waited_since),
            "world_size": config.world_size,
            "local_world_size": config.world_size,
            "node": host,
            "hosts": [{"name": host, "ranks": list(range(config.world_size))}],
            "backend": config.backend if config.world_size > 1 else None,
            "devices": list(self.devices),
            "master_port": port,
            "attempts": self.number + 1,
            **(identified := _identified(config, content)),
            **self._whose(identified, goes_on=bool(earlier) and not forked),
            **self.request.about,
            **provenance.describe(),
        }

    def _whose(self, identified: Record, *, goes_on: bool) -> Record:
        """What the record says of the search that has found the run: it is its still when a person
        goes on with it.
        """
        before = read_result(self.paths) if self.request.resumes else Record()
        if not (goes_on or before.get("identity") == identified["identity"]):
            return Record()
        return cast(
            Record,
            {key: value for key, value in before.items() if key in ("search", "rerun_of")},
        )


def record_end(paths: RunPaths, error: BaseException, ended_at: float | None = None) -> None:
    """Say in result.json that the run has failed, or was interrupted, and what it has come to until
    then.

    Of one that was not to go on so all stays as it was. `ended_at` [by time.time] is given where it
    is not now."""
    status = INTERRUPTED if isinstance(error, KeyboardInterrupt | Interrupted) else FAILED
    try:
        if isinstance(error, ConfigError) and undo.put_back(paths):
            return
        record = read_result(paths)
        reached = so_far(paths, record)
        if record.get("status") == RUNNING:  # else it has cost nothing since it said so itself
            reached |= spending.until_now(record, ended_at)
        reached["status"], reached["error"] = status, str(error) or "interrupted by a person"
        reached["error_kind"] = type(error).__name__
        update_result(paths, **reached)
    except OSError as problem:  # a full disk, maybe: what ended the run is still to be told
        warn(f"{paths.result}: could not be written ({problem})")


def record_pause(paths: RunPaths, ended_at: float | None = None) -> None:
    """Say in result.json that the run has paused as it was told to, and what it has come to until
    then.

    `ended_at` [by time.time] is given where it is not now.
    """
    record = read_result(paths)
    reached = so_far(paths, record)
    if (
        record.get("status") == RUNNING
    ):  # its workers have ended before they could say what it has cost
        reached |= spending.until_now(record, ended_at)
    reached["status"] = PAUSED
    update_result(paths, **reached)


def record_refusal(
    paths: RunPaths, about: Record, request: RunRequest | None, error: ExptError
) -> None:
    """Say in result.json why a run could not start: a sweep's record names it too.

    Without `request` it was none.

    Raises FolderInUse where another command is at work there.
    """
    record: Record = {"status": FAILED, "error": str(error), "error_kind": type(error).__name__}
    record |= {**about, **provenance.describe()}
    if request is not None:
        record.update(_identified(request.config, request.content))
    with at_work(paths):
        if paths.has_trained():  # before: what it has come to is kept
            update_result(paths, **record)
        else:
            create_result(paths, may_exist=True, **record)


def _identified(config: RunConfig, content: Content) -> Record:
    return {
        "identity": identity(config, content),
        "seedless_identity": identity(config, content, but=REPEATED),
        "content": _made(content),
        "config": shown(config),
        "seed": config.seed,
    }


def _made(content: Content) -> Made:
    made: Made = {"data": content.data, "code": content.code}
    if content.weights is not None:
        made["weights"] = content.weights
    if content.fork is not None and content.seedless_fork is not None:
        made |= {"fork": content.fork, "seedless_fork": content.seedless_fork}
    return made
