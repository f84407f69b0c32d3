"""The first weights of a run: those of a file or of another run, or all that a fork resumes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from expt.config import constraints, own_code
from expt.config.constraints import plain
from expt.config.groups import HuggingFaceModel, NamedModel
from expt.config.identity import shown
from expt.config.schema import RunConfig
from expt.data.build import DataInfo
from expt.errors import ConfigError, DataError, listed, warn
from expt.features import Features
from expt.inference import frozen, load
from expt.models import named
from expt.models.hugging_face import HuggingFace
from expt.models.partial_load import SHOWN, is_of_run, load_some, weights_in, what_fits
from expt.runs import checkpoint_file
from expt.runs.named_checkpoint import weights_named
from expt.runs.paths import RunPaths
from expt.runs.result import read_result, result_of_any
from expt.runs.tags import SPLITS
from expt.training import collectives
from expt.training.collectives import Worker
from expt.training.optimizer_state import carry_over
from expt.training.parameter_groups import members
from expt.training.sharding import is_sharded, scatter_state
from expt.worker.checkpoints import Snapshot, read_together

State = Mapping[str, Any]


def load_frozen(worker: Worker, config: RunConfig) -> None:
    """Load the frozen networks of custom classes, which rank 0 finds; a collective.

    Raises ConfigError for one that is no argument in `config`, and so not in the run's identity.
    """
    keys = {name: key for key, name in own_code.frozen_in(plain(config))}
    for other in (one.weights for one in frozen.unread() if str(one.weights) not in keys):
        raise ConfigError(
            f"weights={other}: code makes this expt.Frozen, so that its weights are no part of"
            " the run's identity; give the class an argument, such as teacher={_target_:"
            f" expt.Frozen, weights: {other}}}"
        )
    while True:  # one may have others within
        mine = dict[Any, list[frozen.Frozen]]()
        for one in frozen.unread():  # a worker may have more, of a model that it has built again
            mine.setdefault((str(one.weights), one.model is None), []).append(one)
        read = {}
        if worker.rank == 0:  # one within another is named by its weights alone
            for key, (one, *_) in mine.items():
                read[key] = one.find(keys.get(str(one.weights), "weights"))
        if not (found := collectives.from_rank_0(read)):
            return
        for key, (record, file) in found.items():
            content = read_together(file, worker, functools.partial(mine[key][0].content, file))
            for one in mine[key]:
                one.place(record, content, worker.device)


def base_of(config: RunConfig, paths: RunPaths, worker: Worker) -> State | None:
    """Return the published model in the run's record, as rank 0 reads it; a collective."""
    if not isinstance(config.model, HuggingFaceModel):
        return None
    record = read_result(paths) if worker.rank == 0 else None
    return collectives.from_rank_0(record and record.get("base"))


def begin_with(
    config: RunConfig, module: nn.Module, worker: Worker, data: State, base: str | None = None
) -> State:
    """Load the run's `weights`, if it has any; return the entry of result.json.

    `base` is the digest of the published model's files.
    """
    if isinstance(module, HuggingFace) and worker.rank == 0:
        lacks = f"lacks {listed(module.drawn, SHOWN)}, which are drawn"
        notes = [lacks] if module.drawn and config.weights is None else []
        for note in [*notes, *module.notes]:
            warn(f"model.path={module.base['folder']}: {note}")
    if config.weights is None:
        if worker.rank == 0:
            warn_of_published(config, module)
        return {}
    about, content = load_weights(module, config.weights, worker)
    if worker.rank == 0:
        _warn_of_runs(config, content, data, base)
    return about


def load_weights(module: nn.Module, given: str, worker: Worker) -> tuple[State, State]:
    """Load the fitting tensors of `given`, which rank 0 reads, into `module`; warn of the rest.

    Returns, on rank 0, the entry of result.json (see expt.runs.result.Begun), and all that a file
    of several entries holds. A collective.
    """
    fitting, about, known = _fitting(module, given) if worker.rank == 0 else (None, {}, {})
    own = module.state_dict()
    if any(map(is_sharded, own.values())):
        load_some(module, scatter_state(fitting, own.get, worker.device))
    else:
        load_some(module, fitting or {})
        collectives.broadcast_parameters(module)
    return about, known


def _fitting(module: nn.Module, given: str) -> tuple[dict[str, Tensor], State, State]:
    """Return the tensors of `given` that fit, and the results of `load_weights`."""
    own, file = module.state_dict(), weights_named(given).file
    content = load.read_weights(file, given)
    if not (every := weights_in(content, own.keys())):
        raise ConfigError(f"weights={given}: {file} holds no state_dict; {load.SAVE}")
    found = every[0]
    fit = what_fits(module, found.state)
    fitting, misfits = {name: found.state[name] for name in fit.loaded}, fit.misfits()
    trained = {name for name, _ in module.named_parameters()}
    if not trained & {*fit.loaded}:
        of = content.get("config", {}).get("model") if is_of_run(content) else None
        fix = f"it is of model={of.get('target', of['name'])}; choose that, or" if of else "give"
        if of and isinstance(module, HuggingFace) and of.get("name") == "transformers":
            fix = "expt export RUN --format huggingface makes it a folder for model.path; or give"
        raise ConfigError(
            f"weights={given}: {file} fits this model nowhere ({misfits}); {fix} other weights"
        )
    right = (name for name, one in fitting.items() if _is_right(one, own[name], name in trained))
    if bad := fitting.keys() - {*right}:
        raise ConfigError(
            f"weights={given}: {file} has integers, or numbers that are not finite, in"
            f" {listed(sorted(bad), SHOWN)}; give weights that are finite, and not quantised"
        )
    others = [one.key for one in every[1:] if one.fitting == found.fitting]
    if others and not is_of_run(content):  # else its average is meant
        warn(f"weights={given}: {found.key} is loaded, and not {', '.join(others)}")
    if misfits:
        warn(f"weights={given}: loaded {len(fit.loaded)} of {len(own)} tensors; {misfits}")
    known = content if isinstance(content, Mapping) else {}
    about: State = {"left_out": [*fit.missing, *(one.split(" ")[0] for one in fit.other_shape)]}
    if isinstance(position := known.get("position"), Mapping):
        about = {**about, "epoch": position.get("epoch"), "average": "ema" in known}
    return fitting, about, known


def _is_right(given: Tensor, own: Tensor, trains: bool) -> bool:
    """Return whether weights are finite numbers of the model's kind; a mask may hold -inf."""
    if own.is_floating_point() and not given.is_floating_point():
        return False
    numbers = given.double() if given.is_floating_point() else given  # which float8 is not made for
    return not (numbers.isnan().any() or (trains and numbers.isinf().any()))


def warn_of_published(config: RunConfig, module: nn.Module) -> None:
    """Warn where published weights were trained on images with another normalisation."""
    if isinstance(config.model, NamedModel) and config.model.pretrained and config.weights is None:
        scale = named.normalisation(config.model, module)
        if scale is not None:
            _warn_of_scale(config, "model.pretrained=true", *scale)


def _warn_of_runs(config: RunConfig, content: State, data: State, base: str | None) -> None:
    """Warn where the run that wrote the weights was trained on other data, or on other weights."""
    if getattr(config.model, "needs_base", False):
        run = weights_named(str(config.weights)).run
        known = result_of_any(RunPaths(run)).get("content", {}) if run else {}
        if known.get("base", base) != base:
            warn(f"weights={config.weights}: its adapters are of other files than model.path's")
    settings, about = content.get("config"), content.get("data")
    dataset = (settings.get("dataset") if isinstance(settings, Mapping) else None) or {}
    if "mean" in dataset:
        _warn_of_scale(config, f"weights={config.weights}", dataset["mean"], dataset.get("std"))
    if not isinstance(about, Mapping):
        return
    with contextlib.suppress(ConfigError):  # of other files nothing is known
        for here, there in zip(Features.read(data), Features.read(about), strict=True):
            for why in here.differing(there):
                warn(f"weights={config.weights}: {why}")


def _warn_of_scale(config: RunConfig, word: str, mean: Any, std: Any) -> None:
    ours = _scale(*(getattr(config.dataset, key, None) for key in ("mean", "std")))
    theirs = _scale(mean, std)
    if ours != theirs:
        warn(f"{word}: the weights were trained with {theirs}, and this run has {ours}")


def _scale(mean: Any, std: Any) -> str:
    if mean is None or std is None:
        return "dataset.mean=null dataset.std=null"
    mean, std = (",".join(f"{value:g}" for value in values) for values in (mean, std))
    return f"dataset.mean=[{mean}] dataset.std=[{std}]"


def load_fork(snapshot: Snapshot, config: RunConfig, source: Path) -> State:
    """Continue from another run's checkpoint, which rank 0 reads, and return it; a collective."""
    learner, position = snapshot.learner, snapshot.position
    head = checkpoint_file.read(source) if snapshot.worker.rank == 0 else None
    built = collectives.from_rank_0(head and head["built"])
    saved = snapshot.read(source, numbered=[*members(built["groups"])])
    snapshot.load_weights(saved)
    position.load_state_dict(saved["position"])
    position.begin_fork(saved["steps_per_epoch"])
    before, now = saved["config"], shown(config)
    same_optimizer = _kind(before["optimizer"]) == _kind(now["optimizer"])
    if not same_optimizer:
        trained = f"was trained by {_word(before['optimizer'])}"
        fresh = f"the state of {_word(now['optimizer'])} starts fresh"
        snapshot.worker.warn(f"fork={config.fork}: {trained}; {fresh}")
    # how often this schedule would have been advanced before
    place = position.step - position.offset
    if learner.scheduler_interval == "epoch":
        place = position.epoch - 1 if position.is_within_epoch else position.epoch
    carry_over(
        learner.module,
        learner.optimizer,
        learner.scheduler,
        saved,
        same_optimizer=same_optimizer,
        same_schedule=_is_same_schedule(before["scheduler"], now["scheduler"]),
        place=place,
    )
    if saved["scaler"]:
        learner.precision.scaler.load_state_dict(saved["scaler"])
    snapshot.load_workers(
        saved["workers"], sums=position.is_within_epoch, random=before["seed"] == config.seed
    )
    return saved


def _word(chosen: State) -> str:
    """Return the names of the chosen optimizer and of those in its groups, or their classes."""
    own = (group["optimizer"] for group in chosen.get("groups", ()) if group.get("optimizer"))
    return " and ".join([str(chosen.get("target", chosen["name"])), *map(_word, own)])


def _kind(chosen: State) -> Any:
    """Return names that are equal for optimizers with the same state."""
    own = {group["match"]: group.get("optimizer") for group in chosen.get("groups", ())}
    kinds = [(match, _kind(each)) for match, each in own.items() if each]
    word = str(chosen.get("target", chosen["name"]))
    return ("adam" if word == "adamw" else word), kinds


def _is_same_schedule(before: State, now: State) -> bool:
    """Return whether a schedule can continue from the state of the other."""
    if before["name"] != now["name"]:
        return False
    keys = {"plateau": ("metric",), "_target_": ("target", "kwargs", "interval")}
    return all(before[key] == now[key] for key in keys.get(now["name"], ()))


def release_fork(paths: RunPaths, worker: Worker) -> None:
    """Remove the copy of the other run's checkpoint once the run has its own, on rank 0."""
    if worker.rank == 0 and paths.forked.exists() and paths.last.exists():
        for path in paths.checkpoints.glob(f"{paths.forked.name}*"):
            path.unlink()
        if paths.parts:
            checkpoint_file.remove_unnamed(paths.checkpoints)


def refuse_other(config: RunConfig, info: DataInfo, saved: State) -> None:
    """Raise DataError where the data has other sizes than that of the checkpoint `saved`.

    Nothing else is known of a custom dataset's samples. A fork may have another `train_limit`.
    """
    settings = saved["config"]
    is_fork = config.fork not in (None, settings.get("fork"))
    splits = list(SPLITS)
    if is_fork and settings["dataset"].get("train_limit") != config.dataset.train_limit:
        splits.remove("train")
    sizes = [(one, info.sizes[f"{one}_size"], saved["sizes"][f"{one}_size"]) for one in splits]
    if differ := [f"{has} samples of {x}, and had {had}" for x, has, had in sizes if has != had]:
        fix = "start a run with its weights, by weights=RUN@last" if is_fork else "start a new run"
        raise DataError(
            f"dataset={constraints.word(config.dataset)}: is not what the run was trained on: it"
            f" has {', '.join(differ)}; give the same data, or {fix}"
        )
