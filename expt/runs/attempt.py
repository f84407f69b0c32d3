"""An attempt at a run: its record from begin to end, and the error that ended it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from expt import signals
from expt.config import kept_code, own_code
from expt.config.identity import shown
from expt.errors import ConfigError, ExptError, Interrupted, warn
from expt.gpus import energy_j
from expt.runs import continuing, lineage, provenance
from expt.runs.checkpoint_file import candidates, link
from expt.runs.may_continue import Source
from expt.runs.named_checkpoint import begun_from
from expt.runs.paths import FolderLock, RunPaths, at_work, foreign, written
from expt.runs.request import RunRequest
from expt.runs.result import (
    FAILED,
    INTERRUPTED,
    RUNNING,
    STATUSES,
    Record,
    cost_until_now,
    create_result,
    device_s,
    read_result,
    result_of_any,
    so_far,
    update_result,
)


@dataclass(kw_only=True)
class Attempt:
    """One try at carrying out a request; there are more if workers fail, or the run is resumed."""

    request: RunRequest
    number: int = 0
    devices: tuple[str, ...]
    """The names of GPUs in CUDA_VISIBLE_DEVICES; empty for the CPU."""
    lock: FolderLock | None = None
    """The lock of the run's folder, for the workers to hold too."""
    has_begun: bool = False
    """True once result.json is this attempt's, unless the attempt was refused."""

    @property
    def paths(self) -> RunPaths:
        """The files of the run."""
        return self.request.paths

    def begin(self, port: int | None = None) -> Path | None:
        """Write the first result.json of this attempt; return the checkpoint to begin from.

        Raises ConfigError if its folder holds another run, or the run cannot continue so.
        """
        self._refuse_foreign()
        # Refused before a file is written.
        source, rollback = continuing.find(self.request), Rollback(self.paths)
        if source is not None:
            rollback.save()
        elif self.request.resumes:
            rollback.commit()
            self.paths.clear_records()
        try:
            create_result(
                self.paths, may_exist=self.request.resumes, **self._first_record(port, source)
            )
        except FileExistsError:
            rollback.commit()
            raise ConfigError(
                f"hydra.run.dir={self.paths.folder}: holds a run already; choose another folder"
            ) from None
        with self._recording_errors():
            self._keep_origin()
            return None if source is None else continuing.take(source, self.paths)

    def _keep_origin(self) -> None:
        """Keep the configuration, the code and the tokenizer of the run in its folder."""
        config = self.request.config
        self.paths.write_hydra(self.request.hydra)
        kept_code.keep(config, self.paths.code)
        config.dataset.keep(self.paths.tokenizer)
        own_code.check_caches(own_code.own_modules(own_code.targets(config)).values())

    def _refuse_foreign(self) -> None:
        """Raise ConfigError for files that no record claims: a new start would remove some.

        Also for links whose targets are missing, maybe on a disk that is not mounted.
        """
        paths, record = self.paths, read_result(self.paths)
        found = paths.found()
        if gone := [path for path in found if not path.exists()]:
            link_to = f"is a link to {gone[0].readlink()}, which is missing; put it back"
            raise ConfigError(f"{gone[0]}: {link_to}")
        refused = record.get("status") in STATUSES and not paths.metrics.exists()
        resumes = self.request.resumes and candidates(paths.last)
        if "identity" in record or refused or resumes:
            return
        known = {paths.result, paths.logs(0).parent, paths.sent, paths.before}
        known |= set() if self.request.hydra else {paths.hydra}  # a sweep has just written it
        if others := [path for path in found if path not in known]:
            raise foreign(others[0])

    @contextlib.contextmanager
    def recorded(self) -> Iterator[Path | None]:
        """Keep result.json true while the run trains in this process; yield as `begin` returns."""
        source = self.begin()
        with self._recording_errors():
            yield source

    @contextlib.contextmanager
    def _recording_errors(self) -> Iterator[None]:
        """Record an error of the body in result.json, which is this attempt's."""
        self.has_begun = True
        try:
            yield
        except BaseException as error:
            self.has_begun = not isinstance(error, ConfigError)  # the record was put back
            record_end(self.paths, error)
            raise

    def _first_record(self, port: int | None, source: Source | None) -> Record:
        request, host = self.request, socket.gethostname()
        config, until = request.config, request.until_epoch
        earlier = result_of_any(self.paths) if request.resumes else Record()
        found = source.checkpoint if source is not None and source.rule == "resume" else None
        resumed: Record = {}
        if found is not None:
            resumed["resumed_from"] = {"checkpoint": str(found.file), "step": found.step}
        own = own_code.own_modules(own_code.targets(config)).items()
        # It is still its search's when a person resumes it.
        is_same = resumed or earlier.get("identity") == request.identity.digest
        return {
            **(_kept(earlier, "search", "rerun_of") if is_same else {}),
            **({} if until is None else {"until_epoch": until}),
            **self._lineage(source),
            **_cost_at_start(self.devices, earlier),
            "started": time.time() - (time.monotonic() - request.waited_since),
            "world_size": config.world_size,
            "local_world_size": config.world_size,
            "node": host,
            "hosts": [{"name": host, "ranks": list(range(config.world_size))}],
            "backend": config.backend if config.world_size > 1 else None,
            "devices": list(self.devices),
            "master_port": port,
            "attempts": self.number + 1,
            **_known(request),
            **request.about,
            **provenance.describe(file for name, file in own if not own_code.is_of_main(name)),
            **resumed,
        }

    def _lineage(self, source: Source | None) -> Record:
        """Return the entries of the runs that this one comes from."""
        request, record = self.request, Record()
        weights = request.config.weights
        if source is not None:
            found = source.checkpoint
            if source.rule == "fork" and found.file != self.paths.forked:
                record = _kept(result_of_any(found.paths), "base")
                record["forked_from"] = lineage.fork_entry(request.config, found)
            else:
                before = result_of_any(found.paths)
                own = ("imported",) if source.is_own(self.paths) else ()
                record = _kept(before, "weights_from", "base", *own)
                if "forked_from" in before:
                    record["forked_from"] = lineage.updated_fork_entry(before, request.config)
        if weights is not None and "weights_from" not in record:
            record["weights_from"] = begun_from(weights, request.identity.content.get("weights"))
        return record


def _cost_at_start(devices: Sequence[str], earlier: Record) -> Record:
    """Return the cost of earlier attempts, for the record of one that begins, and the meters."""
    begun: Record = {"device_s_before": device_s(earlier)} if earlier else {}
    if (metered := energy_j(devices)) is not None:
        begun["energy_j_before"] = earlier.get("energy_j", 0.0) - metered
    return begun


def _kept(record: Record, *keys: str) -> Record:
    return cast(Record, {key: value for key, value in record.items() if key in keys})


class Rollback:
    """A resumed run's record, words and numbers as they were, until its workers accept new ones."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths, self._kept = paths, paths.before

    def save(self) -> None:
        """Keep the content as it is, unless an attempt that was killed before has kept it.

        Its record and numbers are replaced as a whole, so links are enough.
        """
        paths, kept = self._paths, self._kept
        if kept.exists():
            return
        temporary = self._aside()
        temporary.mkdir(parents=True)
        for path in (paths.result, paths.metrics):
            if path.exists():
                link(path, temporary / path.name)
        if paths.checkpoints.exists():
            (temporary / paths.checkpoints.name).touch()
        for path in paths.hydra.glob("*.yaml"):  # written in place, so that links are not enough
            (temporary / paths.hydra.name).mkdir(exist_ok=True)
            shutil.copyfile(path, temporary / paths.hydra.name / path.name)
        temporary.rename(kept)

    def _aside(self) -> Path:
        """Return a folder that is not there, for a copy that is not whole."""
        temporary = self._kept.with_name(f"{self._kept.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        return temporary

    def commit(self) -> None:
        """Remove the copy, at once or not at all: the run continues, or has begun again."""
        temporary = self._aside()
        with contextlib.suppress(OSError):  # there is none
            self._kept.rename(temporary)
        shutil.rmtree(temporary, ignore_errors=True)

    def restore(self) -> bool:
        """Put the earlier content back; return whether that was a run's.

        The copy stays whole until all is back: if this is killed, it is done again.
        """
        paths, kept = self._paths, self._kept
        if not kept.exists():
            return False
        was_run = (kept / paths.result.name).exists()
        for path in (paths.result, paths.metrics):
            if (kept / path.name).exists():
                with written(path) as file:
                    file.write((kept / path.name).read_bytes())
            elif path != paths.result:
                path.unlink(missing_ok=True)
        if not (kept / paths.checkpoints.name).exists():
            shutil.rmtree(paths.checkpoints, ignore_errors=True)
        if (kept / paths.hydra.name).exists():
            shutil.copytree(kept / paths.hydra.name, paths.hydra, dirs_exist_ok=True)
        self.commit()
        return was_run


def take_back(request: RunRequest, error: BaseException) -> None:
    """Leave the folder as it was before its last attempt, which `error` ended before any step."""
    paths = request.paths
    number = max(paths.attempts(), default=0)
    shutil.rmtree(paths.logs(number), ignore_errors=True)
    if Rollback(paths).restore():
        return
    if number:  # without a checkpoint its record was begun again
        record_end(paths, error)
        return
    paths.remove_refused()
    if request.hydra:
        shutil.rmtree(paths.hydra, ignore_errors=True)


def record_end(paths: RunPaths, error: BaseException) -> None:
    """Write into result.json that the run has failed, or was interrupted, and how far it came.

    A resumed run that was refused, or interrupted before its first step, is put back.
    """
    is_interrupted = isinstance(error, KeyboardInterrupt | Interrupted)
    status = INTERRUPTED if is_interrupted else FAILED
    try:
        if (is_interrupted or isinstance(error, ConfigError)) and Rollback(paths).restore():
            return
        record = read_result(paths)
        reached = so_far(paths, record)
        if record.get("status") == RUNNING:  # else it has recorded its cost itself
            reached |= cost_until_now(record)
        ended_by = "" if isinstance(error, KeyboardInterrupt) else str(error) or repr(error)
        reached["status"], reached["error"] = status, ended_by or signals.interruption()
        reached["error_kind"] = type(error).__name__
        update_result(paths, **reached)
    except OSError as problem:  # a full disk, maybe: the error itself must still be raised
        warn(f"{paths.result}: could not be written ({problem})")


def record_refusal(
    paths: RunPaths, about: Record, request: RunRequest | None, error: ExptError
) -> None:
    """Write into result.json why a run of a sweep could not start; without `request` it was none.

    Raises FolderInUse where another command is at work there.
    """
    record: Record = {"status": FAILED, "error": str(error), "error_kind": type(error).__name__}
    record |= {**about, **provenance.describe()}
    if request is not None:
        record.update(_known(request))
    with at_work(paths):
        if paths.has_trained():  # its earlier numbers are kept
            update_result(paths, **record)
        else:
            create_result(paths, may_exist=True, **record)


def _known(request: RunRequest) -> Record:
    """Return the entries that are known before a run begins."""
    identity, config = request.identity, request.config
    return {
        "identity": identity.digest,
        "seedless_identity": identity.seedless,
        "content": identity.content,
        "config": shown(config),
        "seed": config.seed,
    }
