"""What to say where a batch norm got one sample, whose mean it would take away."""

from __future__ import annotations

from expt.config.schema import RunConfig

RAISED = "more than 1 value per channel"
"""Of torch's ValueError then."""


def refusal(config: RunConfig) -> str:
    """What is wrong, and what to set."""
    each = config.batch_size // config.world_size // config.gradient_accumulation
    mend = f"drop_last=true, or a batch_size that leaves more than one of {config.batch_size} over"
    if each == 1 or config.drop_last:
        mend = f"batch_size={2 * config.world_size * config.gradient_accumulation} or more"
    return (
        f"batch_size={config.batch_size}: a batch norm of the model cannot train on one sample by"
        f" itself; use {mend}"
    )
