"""The run that another is a fork of: what `fork` names, and the words that ask for it.

Free of torch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from expt.errors import ConfigError, did_you_mean
from expt.runs import provenance
from expt.runs.paths import RunPaths, is_sweep
from expt.runs.result import DAMAGED, Record, result_of_any, results_below
from expt.runs.sweep import latest_sweep
from expt.runs.typed import unquoted
from expt.runs.weights_file import best_of_sweep

CHECKPOINT = r"last|best|\d+|epoch:\d+"
LATEST = re.compile(r"latest((?:/[^@]*)?)((?:@.*)?)", re.DOTALL)
NOT_INHERITED = {"resume", "fork", "weights", "sweep"}
"""Keys that say where a run begins, or that it is one of a grid."""
NAMES_A_RUN = {"fork", "weights", "resume"}
"""Keys whose value is a path into a run's folder, which may have commas in its name."""
OF_TRAINING_DATA = (
    "dataset.augment.",
    "dataset.transforms",
    "dataset.sampling",
    "dataset.train_limit",
)
"""What of a dataset leaves the held-out samples as they are."""


SHARDED = ("fsdp", "hsdp")
OF_SHARDS = ("sharding", "checkpoint.sharded")
OF_DDP = ("ddp.find_unused_parameters", "ddp.static_graph")
"""Keys of the strategies of one kind, which those of the other refuse."""


class Named(NamedTuple):
    """What `fork` names."""

    run: Path
    which: str
    """last, best, a step, epoch:N, or the name of a checkpoint's file."""


def named(given: str) -> Named:
    """The run and the checkpoint that `fork=given` names; that the run has the checkpoint is
    another question.

    Raises ConfigError for what is no run that has begun to train.
    """
    path, which = Path(given), "last"
    if not path.exists() and "@" in given:
        folder, _, which = given.rpartition("@")
        path = Path(folder)
        if not re.fullmatch(CHECKPOINT, which):
            raise ConfigError(
                f"fork={given}: @{which} names no checkpoint; use @STEP, @epoch:N, @best or @last"
            )
    if path.is_file():
        path, which = path.parent.parent, path.name
    if is_sweep(path):
        raise ConfigError(
            f"fork={given}: {best_of_sweep(path, '' if path == Path(given) else which, key='fork')}"
        )
    if not path.exists():
        near = did_you_mean(
            str(path), map(str, path.parent.glob("*") if path.parent.is_dir() else ())
        )
        raise ConfigError(
            f"fork={given}: there is no folder {path}; give that of a run, as in"
            f" fork=RUN@STEP.{near}"
        )
    record = result_of_any(RunPaths(path))
    if record.get("status") == DAMAGED:
        raise ConfigError(
            f"fork={given}: {RunPaths(path).result} is damaged; take its weights by weights={path}"
        )
    if not {"config", "identity", "seedless_identity", "content", "arguments"} <= record.keys():
        raise ConfigError(f"fork={given}: {_no_run(path, record)}")
    return Named(path, which)


def _no_run(path: Path, record: Record) -> str:
    if record:
        return f"the run of {path} has not begun to train, or is of an older version; give another"
    below = [paths.folder for paths, _ in results_below(path)]
    if not below:
        return f"{path} is no folder of a run; give that of one"
    listed = shlex.join([*provenance.program().split(), "report", str(path)])
    return (
        f"{path} holds {len(below)} runs; name one of them, as in fork={below[0]} ({listed} lists"
        " them)"
    )


def values_of(text: str) -> list[str]:
    """What stands between the commas of `text`; parts that together name what is there, as
    `s/a=1,b=2`, are one.
    """
    parts, found = text.split(","), list[str]()
    if all(map(is_there, parts)):
        return parts
    while parts:
        end = next((end for end in range(len(parts), 1, -1) if is_there(",".join(parts[:end]))), 1)
        found.append(",".join(parts[:end]))
        parts = parts[end:]
    return found


def is_there(given: str) -> bool:
    """Whether it names a file or a folder, or a checkpoint of one."""
    try:
        path = Path(without_latest(unquoted(given)))
        return path.exists() or (
            "@" in path.name and path.with_name(path.name.rpartition("@")[0]).exists()
        )
    except (ConfigError, OSError, ValueError):  # no sweep yet, too long, no path at all
        return False


def record_of(given: str) -> Record:
    """What the run says of itself that `fork=given` names. Raises ConfigError as `named`."""
    return result_of_any(RunPaths(named(given).run))


def inherited(arguments: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Of the words that ask for a run those that ask for its fork too, beside those `typed`.

    What is set of a group whose choice is typed is left out: it may not be there.
    """
    keys = {key_of(word) for word in typed}
    return for_strategy(
        [word for word in arguments if _is_inherited(key_of(word), keys)], arguments, typed
    )


def for_strategy(words: Sequence[str], before: Sequence[str], typed: Sequence[str]) -> list[str]:
    """The `words` without settings that the strategy which is `typed` cannot have: they are at
    their defaults then.

    Of `before`, the words of the run that is gone on from, they were of another strategy.
    """
    strategy = _strategy(typed)
    if strategy is None:
        return list(words)
    foreign: tuple[str, ...] = OF_DDP if strategy in SHARDED else OF_SHARDS
    if strategy == "fsdp" or (strategy == "hsdp" and _strategy(before) == "fsdp"):
        foreign += ("sharding.shards",)
    return [word for word in words if not key_of(word).startswith(foreign)]


def _strategy(words: Sequence[str]) -> str | None:
    return next(
        (
            unquoted(word.partition("=")[2])
            for word in reversed(words)
            if key_of(word) == "strategy"
        ),
        None,
    )


def _is_inherited(key: str, typed: Collection[str]) -> bool:
    above = re.split(r"[./]", key)[0]
    return not {key, above} & ({*typed} | NOT_INHERITED | {"hydra"})


def key_of(word: str) -> str:
    """The key of a word such as `+optimizer.lr=0.1`."""
    return word.partition("=")[0].lstrip("+~")


def without_latest(given: str) -> str:
    """Of `latest@STEP` the folder of the newest run of outputs, and the step; `latest/NAME` is one
    of the newest sweep.

    Raises ConfigError where there is none.
    """
    if not (asked := LATEST.fullmatch(given)):
        return given
    name, which = asked[1], asked[2]
    folder = latest_sweep(Path("outputs")) if name else _latest_run(Path("outputs"))
    if folder is None:
        raise ConfigError(
            f"fork={given}: there is no {'sweep' if name else 'run'} in outputs yet; name a folder"
        )
    return f"{folder}{name}{which}"


def _latest_run(outputs: Path) -> Path | None:
    results = [
        path
        for path in outputs.glob(str(RunPaths(Path("*/*")).result))
        if not is_sweep(path.parent.parent)
    ]
    return max(
        (path.parent for path in results if "sweeps" not in path.parts), key=_began, default=None
    )


def _began(run: Path) -> float:
    return result_of_any(RunPaths(run)).get("started", 0.0)


def kept_by(key: str) -> str | None:
    """What of its parent a fork keeps that the setting `key` would change; None where it may be
    another.
    """
    if key == "model.dropout" or key.startswith(OF_TRAINING_DATA):
        return None
    whats = {"model.": "its model", "init.": "its weights", "dataset.": "its data"}
    whats |= {"task.name": "its task", "task.target": "its task"}
    return next((what for start, what in whats.items() if key.startswith(start)), None)
