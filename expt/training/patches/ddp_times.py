"""How long gradients travel: DistributedDataParallel times it anyway, and has no public word for
it.
"""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from expt.training.patches.changed import warn_changed


def all_reduce_s(parallel: DistributedDataParallel, steps: int) -> float | None:
    """What `steps` steps have spent on averaging gradients beyond the backward pass [s]; None where
    torch won't tell.

    From the steps that torch times: the first ten, and every hundredth; of each it tells when the
    next one begins."""
    try:
        found: dict[str, float] = parallel._get_ddp_logging_data()
    except AttributeError as error:
        warn_changed("the time that gradients travel", str(error))
        return None
    if "avg_backward_comm_time" not in found:
        return None
    hidden_ns = found.get(
        "avg_backward_compute_comm_overlap_time", 0
    )  # behind the rest of the backward pass
    return max(0, found["avg_backward_comm_time"] - hidden_ns) / 1e9 * steps
