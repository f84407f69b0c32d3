"""What a run is made of apart from its settings: the digests of its data, code and first weights.

They are the same on another machine, and others for other files: a dataset of the same name and
folder may be another one.
"""

from __future__ import annotations

from expt import progress
from expt.config import user_code
from expt.config.identity import Content
from expt.config.schema import RunConfig
from expt.data.cache import of_content
from expt.errors import ConfigError, DataError, RunFailed
from expt.machine import usable_cpus
from expt.runs import continuing
from expt.runs.named_checkpoint import chosen


def content_of(
    config: RunConfig, *, fetch: bool = True, to_train: bool = True, fork: Content | None = None
) -> Content:
    """Return what the run is made of; files that were not read before are read.

    With `fetch` what torchvision has to download is there then. Raise DataError where files cannot
    be read, or are another known dataset's, and `to_train` where a folder has nothing to train on;
    ConfigError where a checkpoint to fork is not there. `fork` is of another fork of the same run.
    """
    return continuing.as_forked(config, _content(config, fetch=fetch, to_train=to_train), fork)


@progress.phase("looking at the dataset's files")
def _content(config: RunConfig, *, fetch: bool = True, to_train: bool = True) -> Content:
    code = user_code.fingerprint(user_code.targets(config))
    if fetch and config.dataset.known_once_fetched:
        config.dataset.prepare()
    parts = config.dataset.parts() if to_train else None
    if parts is not None and "train" not in parts:
        root = getattr(config.dataset, "root", "")
        raise DataError(f"dataset.root={root}: holds no folder train; add it")
    try:
        data = config.dataset.fingerprint()
    except DataError:
        if check := config.dataset.prepare():  # they say what else is wrong
            check(usable_cpus())
        raise
    content = Content(data, code, of_weights(config))
    return continuing.as_continued(config, content)


def refuse_changed(config: RunConfig, content: Content, *, to_train: bool = True) -> None:
    """Raise RunFailed where files have changed since `content` was taken.

    The run would not be what it is known as. Raise DataError where the files are gone.
    """
    now = _content(config, to_train=to_train)
    if now.data is None and content.data:
        config.dataset.prepare()
    kinds = ("dataset's files", "own source", "first weights")
    for what, before, after in zip(kinds, content, now, strict=False):
        if before != after:
            raise RunFailed(
                f"the {what} changed after the command was typed; type it again, for another run"
            )


def of_weights(config: RunConfig) -> str | None:
    """Return the checksum of the file that `config.weights` names; None where none is needed."""
    if config.weights is None:
        return None
    try:
        return of_content([chosen(config.weights).file], "weights")
    except ConfigError:
        if config.resume is not None:  # its checkpoint has what came of them
            return None
        raise


def refuse_missing_parts(config: RunConfig) -> None:
    """Raise ConfigError where a folder has not what is to be evaluated, before all is decoded."""
    parts, dataset = config.dataset.parts(), config.dataset
    if parts is not None:
        held_out = dataset.val_fraction > 0 or dataset.folds is not None
        refuse_missing(config, val=held_out or "val" in parts, test="test" in parts)


def refuse_missing(config: RunConfig, *, val: bool, test: bool) -> None:
    """Raise ConfigError where there is no `val` or `test`, and it is to be evaluated."""
    if not val and config.eval_split == "val":
        raise ConfigError(
            f"dataset.val_fraction={config.dataset.val_fraction}: leaves nothing to evaluate on,"
            f" for {config.dataset.label} has no val; hold some of train out (of an"
            " IterableDataset none can be), give a custom dataset one, e.g."
            " '+dataset.val={split: val}', or use eval_split=test"
        )
    if not test and "test" in (config.eval_split, config.objective.partition("/")[2]):
        key = "eval_split=test" if config.eval_split == "test" else f"objective={config.objective}"
        raise ConfigError(
            f"{key}: {config.dataset.label} has no test set; use eval_split=val"
            " objective=accuracy/val"
        )
