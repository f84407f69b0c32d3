"""The run's optimiser. One of a person's own is to come to the same weights where each worker has a
part of them.

That is tried out on a few small parameters, whole and sharded as the run's are, with the same
gradients, and with a resume in between."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from expt.config import groups, secrets, user_class, user_code
from expt.config.schema import RunConfig
from expt.errors import ConfigError, warn
from expt.training import collectives, optim, sharding
from expt.training.collectives import Worker
from expt.training.offload import offload_states
from expt.training.whole_state import Place, gathered, map_tensors
from expt.worker import random_state
from expt.worker.diagnosis import lost_peers
from expt.worker.sharding import shards_of

Spread = Callable[[Tensor], Tensor]
"""From a whole tensor to what a worker has of it."""
SCALES = (0.01, 1.0, 100.0, 0.01, 1.0, 100.0)
"""The gradients' size in each step: a limit, as of a norm, is passed by some of them."""
COLUMNS = 3
"""Of a small parameter, at most."""
ALIKE, ROUNDING = 1e-3, 1e-6
"""How far weights may be apart: of how far they have moved, and of themselves."""


def build_optimizer(config: RunConfig, module: nn.Module, worker: Worker) -> Optimizer:
    """That of `module`, with its states where they are to be.

    Raises ConfigError as `check_optimizer`.
    """
    optimizer = optim.build_optimizer(config.optimizer, module, unguarded=config.patches.unguarded)
    check_optimizer(config, module, worker)
    if config.offload and worker.device.type == "cuda":  # on the CPU they are there
        offload_states(optimizer)
    return optimizer


def check_optimizer(config: RunConfig, module: nn.Module, worker: Worker) -> None:
    """Raise ConfigError where the own optimiser of a sharded `module` needs whole tensors.

    Not on every worker where it fails on some of them alone, after which the others can only be
    ended. Warns where it can't be tried. A collective, which leaves all random numbers as they
    were."""
    if not config.is_sharded or not isinstance(config.optimizer, groups.TargetOptimizer):
        return
    before = random_state.state_dict(worker.device)
    try:
        chosen = optim.groups_of(config.optimizer, module)
        _try_out(_Trial.of(config.optimizer, chosen, shards_of(config, worker)), worker)
    finally:
        random_state.load_state_dict(before, worker.device)


class _Trial(NamedTuple):
    wanted: groups.TargetOptimizer
    settings: list[dict[str, Any]] | None
    """Of each group of parameters; None where the optimiser is given no groups."""
    starts: list[list[Tensor]]
    """Of each group, or of all, the first weights."""
    spread: Spread

    @classmethod
    def of(
        cls,
        wanted: groups.TargetOptimizer,
        chosen: list[nn.Parameter] | list[dict[str, Any]],
        shards: int,
    ) -> _Trial:
        """On parameters of the shapes of those `chosen`, of fewer rows and columns, that so many
        workers share.
        """
        settings = [one for one in chosen if isinstance(one, dict)]
        members: list[Sequence[Tensor]] = [group["params"] for group in settings] or [chosen]  # type: ignore[list-item]
        draw = torch.Generator().manual_seed(0)
        starts = [[_drawn(like, draw) * 0.1 for like in _small(group, shards)] for group in members]
        return cls(wanted, settings or None, starts, sharding.spread_as(members[0][0]))

    def weights(
        self, worker: Worker, spread: Spread, *, seed: int = 0, at_once: bool = False
    ) -> tuple[list[Tensor], str | None]:
        """Those that it comes to, whole, and what went wrong, where they are those before that.

        It is saved and resumed on the way, unless all is done `at_once`. A collective: of whole
        tensors it says what went wrong on any worker; of parts on this one, for others may wait for
        it within a collective of their step."""
        tried = _of_all if spread is _as_it_is else functools.partial(_of_this, worker)
        random_state.seed(seed)
        draw, weights, state = torch.Generator().manual_seed(1), self.starts, None
        for scales in (SCALES,) if at_once else (SCALES[:3], SCALES[3:]):
            small = [
                [nn.Parameter(spread(weight.clone())) for weight in group] for group in weights
            ]
            optimizer, problem = tried(
                functools.partial(self._steps, small, state, spread, scales, draw)
            )
            if problem:
                break
            weights = [
                [sharding.whole(parameter.detach()) for parameter in group] for group in small
            ]
            state = gathered(optimizer.state_dict(), keep=True)
        return [*chain(*weights)], problem

    def has_part(self, weight: Tensor) -> bool:
        """Whether this worker has some of it where it is shared out."""
        return sharding.local(self.spread(weight)).numel() > 0

    def _steps(
        self,
        small: list[list[nn.Parameter]],
        state: Any,
        spread: Spread,
        scales: Sequence[float],
        draw: torch.Generator,
    ) -> Optimizer:
        """That of the `small` parameters, after a step by gradients of each size, begun with a
        whole `state`.
        """
        given: Any = small[0]
        if self.settings is not None:
            given = [
                {**settings, "params": group}
                for settings, group in zip(self.settings, small, strict=True)
            ]
        optimizer = user_class.build(self.wanted.target, Optimizer, given, **self.wanted.kwargs)
        numbered = enumerate(
            chain.from_iterable(group["params"] for group in optimizer.param_groups)
        )
        patterns: dict[Place, Tensor] = {
            ("state", index): parameter for index, parameter in numbered
        }

        def resumed(place: Place, tensor: Tensor) -> Tensor:  # as a run's is, see Snapshot.read
            like = patterns.get(place[:2])
            return (
                spread(tensor.to(like.device))
                if like is not None and like.shape == tensor.shape
                else tensor
            )

        if state is not None:
            optimizer.load_state_dict(map_tensors(resumed, state))
        for scale in scales:
            for parameter, start in zip(chain(*small), chain(*self.starts), strict=True):
                parameter.grad = spread(_drawn(start, draw) * scale)
            optimizer.step()
        if _has_sums_of_parts(optimizer):
            raise TypeError(
                "its state has a sum that is of each worker's part, which no checkpoint can hold"
            )
        return optimizer


def _has_sums_of_parts(optimizer: Optimizer) -> bool:
    found: list[Any] = []
    map_tensors(lambda _, tensor: found.append(tensor), optimizer.state_dict())
    return any(
        place.is_partial() for tensor in found for place in getattr(tensor, "placements", ())
    )


def _small(parameters: Sequence[Tensor], shards: int) -> list[Tensor]:
    """An empty tensor for each shape that they have where no side is longer than it needs to be."""
    shapes = {
        (_rows(one.shape[0], shards), *(min(size, COLUMNS) for size in one.shape[1:])): (
            one.dtype,
            one.device,
        )
        for one in parameters
    }
    return [
        torch.empty(shape, dtype=dtype, device=device) for shape, (dtype, device) in shapes.items()
    ]


def _rows(rows: int, shards: int) -> int:
    """Few that are shared out as so many are: not as many for each worker, or none for some as 9 of
    4 workers are.
    """
    if rows < 2 * shards:
        return rows
    each = math.ceil(rows / shards)
    return 2 * shards - 1 if rows > each * (shards - 1) else shards + 1


def _drawn(like: Tensor, draw: torch.Generator) -> Tensor:
    """Random numbers, which are larger in later rows: of no two parts they are alike in size."""
    values = torch.randn(like.shape, generator=draw)
    return (values * torch.linspace(0.5, 2, len(like)).view(-1, *[1] * (like.dim() - 1))).to(like)


def _try_out(trial: _Trial, worker: Worker) -> None:
    where = f"optimizer._target_={trial.wanted.target}"
    again = functools.partial(trial.weights, worker, _as_it_is, seed=1, at_once=True)
    found, problem = trial.weights(worker, _as_it_is, at_once=True)
    if problem or (problem := _why_no_measure(found, again()[0])):
        if worker.rank == 0:
            warn(
                f"{where}: could not be tried on small parameters ({problem}): whether it comes to"
                " the weights of strategy=ddp where each worker has a part of them is not known"
            )
        return
    resumed, problem = trial.weights(worker, _as_it_is)
    if problem or not all(map(_are_alike, resumed, found, chain(*trial.starts))):
        why = f" ({problem})" if problem else ""
        mend = "let it keep what it remembers in self.state"
        raise ConfigError(f"{where}: comes to other weights once it is resumed{why}; {mend}")
    mend = "use strategy=ddp, or an optimizer that treats each number by itself"
    parts, problem = trial.weights(worker, trial.spread)
    if problem:
        none = (
            ""
            if all(map(trial.has_part, chain(*trial.starts)))
            else " (of one with few rows some have none)"
        )
        raise ConfigError(
            f"{where}: fails where each worker has a part of each tensor{none}, or once it is"
            f" resumed there ({problem}); {mend}"
        )
    if not all(map(_are_alike, parts, found, chain(*trial.starts))):
        raise ConfigError(
            f"{where}: comes to other weights where each worker has a part of each tensor; {mend}"
        )


def _as_it_is(whole: Tensor) -> Tensor:
    return whole


def _of_all(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `work` gives, and what went wrong on any worker; a collective."""
    found, problem = None, None
    try:
        found = work()
    except Exception as error:  # of a person's own code
        problem = _told(error)
    problems = collectives.gather_across_workers(problem)
    return found, next((each for each in problems if each), None)


def _of_this(worker: Worker, work: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `work` gives, and what went wrong on this worker.

    Raises where another is gone, which knows why.
    """
    try:
        return work(), None
    except Exception as error:
        if lost_peers(error, worker):
            raise
        return None, _told(error)


def _told(error: Exception) -> str:
    frame = user_code.own_frame(error)
    where = f", {Path(frame.filename).name}:{frame.lineno}" if frame else ""
    return f"{textwrap.shorten(secrets.said(error), 120, placeholder=' ...')}{where}"


def _why_no_measure(weights: Sequence[Tensor], other: Sequence[Tensor]) -> str | None:
    """Why `weights` say nothing, None where they do; `other` came from other random numbers."""
    if not all(one.isfinite().all() for one in weights):
        return "its weights are not finite"
    return None if all(map(torch.equal, weights, other)) else "it draws random numbers"


def _are_alike(found: Tensor, expected: Tensor, start: Tensor) -> bool:
    apart, moved = (found - expected).abs().max(), (expected - start).abs().max()
    return bool(apart <= ALIKE * moved + ROUNDING * expected.abs().max())
