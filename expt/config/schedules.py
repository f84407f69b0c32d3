"""How many steps a schedule is planned for, where its learning rates depend on that.

Free of torch.
"""

from __future__ import annotations

from expt.config import groups

Scheduler = (
    groups.Constant
    | groups.Cosine
    | groups.Step
    | groups.OneCycle
    | groups.Plateau
    | groups.TargetScheduler
)


def planned_steps(config: Scheduler, *, steps_per_epoch: int, total_steps: int) -> int | None:
    """Optimiser steps to the end of the plan, which may be before or after the run's; None for
    those without one.

    Of a person's own scheduler nothing is known here.
    """
    if not isinstance(config, groups.Cosine | groups.OneCycle):
        return None
    return total_steps if config.epochs is None else max(1, round(config.epochs * steps_per_epoch))
