"""The digests of the files that a run is made of: its data, its code and its first weights.

Equal files have equal digests on every machine; a dataset of the same name may have others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from expt import progress
from expt.config import own_code, secrets
from expt.config.constraints import plain
from expt.config.groups import HuggingFaceModel
from expt.config.identity import PARTS, Content, Identity, changed_parts
from expt.config.schema import RunConfig
from expt.data.checksums import of_content
from expt.errors import ConfigError, DataError, RunFailed
from expt.machine import usable_cpus
from expt.runs import lineage
from expt.runs.named_checkpoint import weights_named
from expt.runs.paths import RunPaths
from expt.runs.request import Evaluation, RunRequest
from expt.runs.result import Record, result_of_any


def identity_of(config: RunConfig, paths: RunPaths | None = None) -> Identity:
    """Return the identity of a run, which continues a run in its folder `paths`.

    Raises DataError or ConfigError as `content_of` does, and where a fork's parent is not there.
    """
    before = lineage.record_to_continue(config, paths)
    content = content_of(config, before)
    return lineage.identity(config, {**content, **lineage.fork_content(config, before)}, before)


@progress.phase("looking at the dataset's files")
def content_of(config: RunConfig, before: Record | None = None, *, begins: bool = True) -> Content:
    """Return the digests of files; those that were not read before are read.

    A run that continues that of the record `before` has the first weights of that one. Without
    `begins`, as in an evaluation, there are no published model and no frozen networks. Raise
    DataError where files cannot be read, or are another known dataset's; ConfigError where weights
    are not there.
    """
    own: Content = {}
    if begins:
        own = {"base": _of_base(config, before or {}), "frozen": _of_frozen(plain(config))}
    try:
        data = config.dataset.fingerprint()
    except DataError:
        if check := config.dataset.prepare(config.task):  # they name other errors, too
            check(usable_cpus())
        raise
    made = (before or {}).get("content")
    weights = _of_weights(config) if made is None else made.get("weights")
    code = own_code.fingerprint(own_code.targets(config))
    more: Content = {"weights": weights, **own}
    return {"data": data, "code": code, **{part: one for part, one in more.items() if one}}  # type: ignore[typeddict-item]


def published(model: HuggingFaceModel) -> str:
    """Return the digest of a published model's files. Raise ConfigError where there are none."""
    from expt.models import published_files  # late: other models have none

    return of_content(published_files.counted(model), "published")


def _of_base(config: RunConfig, before: Record) -> str | None:
    """Return the digest of the published model, or the one of the run that has its weights."""
    if not isinstance(config.model, HuggingFaceModel):
        return None
    then, made = before.get("config", {}).get("model", {}), before.get("content", Content())
    if made.get("base") and then.get("path") == config.model.path and not config.model.needs_base:
        return made["base"]
    return published(config.model)


def other_frozen(record: Record) -> str:
    """Return the line for a run whose model's frozen networks are gone or others now, or "".

    Those of a task have a part in its training; with them the digest of all says nothing of these.
    """
    settings, then = _settings_of(record), record.get("content", Content()).get("frozen")
    keys = dict(own_code.frozen_in(settings))
    if then is None or not all(key.startswith("model.") for key in keys):
        return ""
    try:
        if _of_frozen(settings) == then:
            return ""
    except ConfigError as error:
        return str(error)  # it names the key, which the model that misses it doesn't know
    names = ", ".join(f"{key}={name}" for key, name in keys.items())
    return f"{names}: the run was trained with other frozen networks; the numbers may differ"


def _settings_of(record: Record) -> Mapping[str, Any]:
    found: Mapping[str, Any] = secrets.restored(record.get("config", {}), all_of_them=False)
    return found


def _of_frozen(settings: Mapping[str, Any]) -> str | None:
    """Return the digest of all frozen networks; None where there are none."""
    files = [*_files_of_frozen(settings)]
    return of_content(files, "weights") if files else None


def _files_of_frozen(settings: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files of frozen networks, and of those within their runs' models."""
    for key, name in own_code.frozen_in(settings):
        file, run = weights_named(name, key)
        yield file
        if run is not None:
            settings = _settings_of(result_of_any(RunPaths(run)))
            try:
                yield from _files_of_frozen({"model": settings.get("model")})
            except ConfigError as error:
                raise ConfigError(f"{key}={name}: the run needs {error}") from error


def _of_weights(config: RunConfig) -> str | None:
    """Return the checksum of the file that `config.weights` names; None where none is needed."""
    if config.weights is None:
        return None
    try:
        return of_content([weights_named(config.weights).file], "weights")
    except ConfigError:
        if config.resume is not None:  # its checkpoint has the trained ones
            return None
        raise


def refuse_changed(request: RunRequest) -> None:
    """Raise RunFailed where files have changed since the identity of the run was made.

    The run would be another than its identity says. Raise DataError where the files are gone.
    """
    config, then = request.config, request.identity.content
    before = lineage.record_to_continue(config, request.paths)
    begins = not isinstance(request.instead, Evaluation)
    now = content_of(config, before, begins=begins)
    if now["data"] is None and then.get("data"):
        config.dataset.prepare(config.task)
    unused = set() if begins else {"base", "frozen"}
    if changed := [part for part in changed_parts(then, now) if part not in unused]:
        raise RunFailed(
            f"the {PARTS[changed[0]]} changed after the command was typed; type it again, for"
            " another run"
        )
