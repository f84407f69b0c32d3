"""A step of a configuration on batches that are ready: its time, its arithmetic, and the time of a
bare loop; prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from expt.training import collectives
from scripts.benchmarks.step_worker import BareLoop, ExptLoop, configuration, measure

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True, help="of each block")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    config = configuration(args.overrides)
    worker = collectives.worker_from(os.environ | ALONE, gpus=config.gpu_indices)
    torch.set_num_threads(config.threads)
    if config.num_gpus:
        torch.cuda.set_device(worker.device)
    torch.backends.cudnn.benchmark = True  # as a run has it
    ours = ExptLoop(config, worker)
    began = time.perf_counter()
    ours.run(1)
    if config.num_gpus:
        torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    bare = BareLoop(replace(config, compile=False), worker, ours.batches)
    with FlopCounterMode(display=False) as counter:
        bare.run(1)
    loops = {"expt": ours.run, "bare": bare.run}
    step_s = measure(loops, steps=args.steps, rounds=args.rounds, device=worker.device)
    print(json.dumps({**step_s, "flops": counter.get_total_flops(), "first_s": first_s}))


if __name__ == "__main__":
    main()
