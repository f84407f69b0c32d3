"""Early stopping of a search: which run pauses when, which goes on, and whose checkpoints may go."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from types import MappingProxyType

from expt.config.schema import RunConfig
from expt.config.search import Search
from expt.config.task_rules import measured_each_epoch
from expt.errors import ConfigError, FolderInUse
from expt.runs import checkpoint_file
from expt.runs.folder_lock import at_work
from expt.runs.paths import RunPaths
from expt.runs.result import PAUSED, Record, read_result, update_result
from expt.search.alike import Changes, changes_length
from expt.search.goals import Goal
from expt.search.history import Point, best
from expt.search.rungs import Trial, rungs_of
from expt.search.space import Space


class Pausing:
    """The rungs of a search whose runs are like `config`."""

    def __init__(
        self,
        settings: Search,
        config: RunConfig,
        goals: Sequence[Goal],
        space: Space,
        changes: Changes = MappingProxyType({}),
        begins_at: int = 0,
    ) -> None:
        """The runs are forks of others that had done up to `begins_at` epochs.

        Raises ConfigError where such runs cannot be compared after an epoch.
        """
        assert settings.rungs is not None
        _check(settings, config, goals, changes_length(space, changes), begins_at)
        self._goal, self._keeps = goals[0], settings.keep_checkpoints
        self._rungs = rungs_of(
            settings.rungs,
            epochs=config.epochs,
            min_epochs=settings.min_epochs,
            reduction=settings.reduction,
            begins_at=begins_at,
        )

    def first_stop(self, number: int) -> int | None:
        """The epoch after which a new run of that number pauses; None where it goes to its end."""
        return self._rungs.next_stop(number, 0)

    def stop_of(self, number: int, record: Record) -> int | None:
        """Where a run that was begun, and has come to no end, stops: where it was to, when it was
        begun.
        """
        return record.get("until_epoch") if "attempts" in record else self.first_stop(number)

    def next(self, points: Sequence[Point]) -> tuple[Point, int | None] | None:
        """The paused run that goes on first, and the epoch after which it pauses again; None where
        none goes on.
        """
        trials = self._trials(points)
        number = self._rungs.promotable(trials)
        if number is None:
            return None
        done = next(trial.epochs for trial in trials if trial.number == number)
        point = next(point for point in points if point.number == number)
        return point, self._rungs.next_stop(number, done)

    def clear(self, points: Sequence[Point], planned: Collection[int]) -> None:
        """Remove the checkpoints of runs that never go on in a search of these numbers, but for the
        best's of all.
        """
        if self._keeps:
            return
        leading = best(points, [self._goal])
        hopeless = {*self._rungs.hopeless(self._trials(points), planned)} - {
            leading.number if leading else None
        }
        for point in points:
            if point.number in hopeless and point.folder is not None:
                remove_checkpoints(RunPaths(point.folder))

    def _trials(self, points: Iterable[Point]) -> list[Trial]:
        return [
            Trial(
                number=point.number,
                status=point.status,
                costs={epoch: self._goal.cost(value) for epoch, value in point.rung_values.items()},
                is_allowed=point.is_allowed,
                is_past_rungs=point.is_past_rungs,
            )
            for point in points
            if point.number is not None
        ]


def _check(
    settings: Search,
    config: RunConfig,
    goals: Sequence[Goal],
    of_lengths: str | None,
    begins_at: int,
) -> None:
    key = f"search.rungs={settings.rungs}"
    if len(goals) > 1:
        tags = ",".join(goal.tag for goal in goals)
        raise ConfigError(
            f"{key}: compares runs by one objective, not by [{tags}]; name one, or use"
            " search.rungs=null"
        )
    if of_lengths is not None:
        mend = "give epochs one value, or use search.rungs=null"
        raise ConfigError(f"{key}: compares runs of as many epochs{of_lengths}; {mend}")
    measured = measured_each_epoch(config)
    if goals[0].tag not in measured:
        instead = f"{goals[0].tag.partition('/')[0]}/{config.eval_split}"
        mend = f"objective={instead}" if instead in measured else f"one of {', '.join(measured)}"
        raise ConfigError(
            f"{key}: objective={goals[0].tag} is not measured after each epoch; use {mend}"
        )
    if settings.min_epochs >= config.epochs - begins_at:
        of_parent = f", {begins_at} of them of the run that it is a fork of" if begins_at else ""
        raise ConfigError(
            f"search.min_epochs={settings.min_epochs}: a run has epochs={config.epochs}{of_parent},"
            " and would never pause; give less, or more epochs"
        )


def remove_checkpoints(paths: RunPaths) -> None:
    """Where another command is at work in the run's folder, or it no longer waits, it keeps them."""
    if not paths.kept_for_itself:
        return
    try:
        with at_work(paths):
            if read_result(paths).get("status") == PAUSED:
                update_result(paths, resumable=False)
                paths.remove_checkpoints()
                checkpoint_file.remove_unnamed(paths.checkpoints)
    except FolderInUse:
        pass
