"""One worker of the measures of single steps: expt's own loop over ready batches, against one that
does less.

Started by scripts/benchmarks/steps.py with RANK and its companions in the environment; prints a
line of JSON."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from expt import machine
from expt.command.compose import Composer
from expt.config.parse import parse
from expt.config.schema import RunConfig
from expt.dashboards.events import Writer
from expt.data.loading import Batch
from expt.runs import checkpoint
from expt.tasks.sums import Sums
from expt.training import collectives
from expt.training.learner import Position
from expt.training.loop import evaluate, train_epoch
from expt.worker import build
from expt.worker.checkpoints import Snapshot
from expt.worker.rank_health import RankHealth

BATCHES = 8


def main() -> None:
    """Measure, and let rank 0 tell."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--mode", choices=["bare", "no_sync", "no_checkpoint", "no_dashboard"], required=True
    )
    parser.add_argument("--steps", type=int, required=True, help="of each block")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    config = configuration(args.overrides)
    worker = collectives.worker_from(os.environ, gpus=config.gpu_indices)
    torch.set_num_threads(config.threads)
    with collectives.process_group(worker, backend=config.backend, timeout_s=600):
        ours = ExptLoop(config, worker)
        loops = {"expt": ours.run, args.mode: ours.without_all_reduce}
        if args.mode == "bare":
            loops[args.mode] = BareLoop(config, worker, ours.batches).run
        elif args.mode == "no_checkpoint":
            loops = {"expt": ours.with_checkpoint, args.mode: ours.run}
        elif args.mode == "no_dashboard":
            epoch = ExptEpoch(ours, config, worker)
            loops = {"expt": epoch.with_dashboard, args.mode: epoch.run, "steps": ours.run}
        step_s = measure(loops, steps=args.steps, rounds=args.rounds, device=worker.device)
    if worker.rank == 0:
        print(json.dumps(step_s), flush=True)


class ExptLoop:
    """train.train_epoch over batches that are ready."""

    def __init__(self, config: RunConfig, worker: collectives.Worker) -> None:
        torch.manual_seed(0)
        self.data = build.build_data(config, worker)
        self.learner = build.build_learner(config, self.data, worker)
        self.batches = [
            _copied(batch) for batch in itertools.islice(self.data.train.epoch(1), BATCHES)
        ]
        self._worker = worker
        self._sums = self.sums()
        self._position = Position(steps_per_epoch=1 << 60, total_steps=1 << 60)

    def sums(self) -> Sums:
        """New ones."""
        return Sums(self.learner.task, self._worker.device)

    def run(self, steps: int) -> None:
        """`steps` steps, as an epoch has them between two log points."""
        train_epoch(
            self.learner,
            itertools.islice(itertools.cycle(self.batches), steps),
            self._position,
            self._sums,
            log_every=1 << 60,
        )

    def with_checkpoint(self, steps: int) -> None:
        """The same, then a checkpoint as a run writes it; waited for, where a run trains on
        meanwhile.
        """
        self.run(steps)
        state = Snapshot(self.learner, self._position, self._sums, self._worker).state_dict()
        if self._worker.rank == 0:
            with tempfile.TemporaryDirectory(prefix="expt-bench-") as folder:
                writer = checkpoint.Writer(
                    Path(folder) / "last.safetensors", Path(folder) / "best.safetensors", keep=1
                )
                writer.save(state, bests=[state["position"]["step"]])
                writer.wait()

    def without_all_reduce(self, steps: int) -> None:
        """The same, each worker for itself."""
        parallel = self.learner.strategy.model
        with (
            parallel.no_sync()
            if isinstance(parallel, DistributedDataParallel)
            else contextlib.nullcontext()
        ):
            self.run(steps)


class ExptEpoch:
    """A few steps, the sums over all workers, and an evaluation, as a run has them; with its
    dashboard or without.
    """

    def __init__(self, loop: ExptLoop, config: RunConfig, worker: collectives.Worker) -> None:
        self._loop, self._config, self._worker = loop, config, worker
        self._folder = tempfile.TemporaryDirectory(prefix="expt-bench-")
        self._events = Writer(Path(self._folder.name), {}, {}) if worker.rank == 0 else None

    def run(self, steps: int) -> None:
        """Without: `steps` steps, and the evaluation."""
        position, sums = (
            Position(steps_per_epoch=steps, total_steps=steps),
            Sums(self._loop.learner.task, self._worker.device),
        )
        self._train(self._batches(steps), position, sums, lambda: None)
        collectives.sum_across_workers(sums.values).tolist()
        self._evaluate(None)

    def with_dashboard(self, steps: int) -> None:
        """With all that a run's first and last epoch show, but for the model's graph, which is
        traced once.
        """
        position, sums = (
            Position(steps_per_epoch=steps, total_steps=steps),
            Sums(self._loop.learner.task, self._worker.device),
        )
        learner, data, worker = self._loop.learner, self._loop.data, self._worker
        dashboard = build.build_dashboard(self._config, self._events, data, learner, position)
        self._train(dashboard.watch(self._batches(steps)), position, sums, dashboard.before_update)
        health = RankHealth(learner, position, worker, check_weights=True)
        health.end_epoch(sums.values, wish=dashboard.wants_review)
        dashboard.values(health.scalars())
        dashboard.expect_evaluation(review=bool(health.readings[0].wish))
        dashboard.end_epoch()
        self._evaluate(dashboard.review())
        dashboard.end_evaluation(str(self._config.eval_split))

    def _batches(self, steps: int) -> Iterator[Batch]:
        return itertools.islice(itertools.cycle(self._loop.batches), steps)

    def _train(
        self,
        batches: Iterable[Batch],
        position: Position,
        sums: Sums,
        on_gradients: Callable[[], None],
    ) -> None:
        train_epoch(
            self._loop.learner,
            batches,
            position,
            sums,
            log_every=1 << 60,
            on_gradients=on_gradients,
        )

    def _evaluate(self, observe: Callable[[Batch, torch.Tensor], None] | None) -> None:
        test = self._loop.data.test
        assert test is not None
        evaluate(self._loop.learner, test.evaluation(), self._worker.device, observe)


class BareLoop:
    """Forward, backward, step: nothing else."""

    def __init__(self, config: RunConfig, worker: collectives.Worker, batches: list[Batch]) -> None:
        learner = build.build_learner(config, build.build_data(config, worker), worker)
        self._module, self._precision = learner.module.train(), learner.precision
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=0.05, fused=True)
        self._batches = batches

    def run(self, steps: int) -> None:
        """`steps` steps."""
        for batch in itertools.islice(itertools.cycle(self._batches), steps):
            with self._precision.autocast():
                outputs = self._module(batch.inputs).flatten(0, -2)
                loss = functional.cross_entropy(outputs, batch.targets.flatten())
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()


def configuration(overrides: list[str]) -> RunConfig:
    """Return the configuration of these words on this machine."""
    return parse(Composer().settings(overrides, sweep=False), machine.detect())


def _copied(batch: Batch) -> Batch:
    images = batch.inputs.clone(memory_format=torch.preserve_format)
    return Batch(images, batch.targets.clone(), *batch[2:])


def measure(
    loops: Mapping[str, Callable[[int], None]], *, steps: int, rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds per step of each loop, in blocks that alternate; the first round warms up."""
    step_s: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds + 1):
        for name, loop in loops.items():
            _wait(device)
            began = time.perf_counter()
            loop(steps)
            _wait(device)
            step_s[name].append((time.perf_counter() - began) / steps)
    return {name: values[1:] for name, values in step_s.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
