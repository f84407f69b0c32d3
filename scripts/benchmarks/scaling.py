"""`scripts/scaling`: the efficiency to expect of many GPUs, and how far off that model is on this
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from expt.machine import usable_cpus
from scripts.benchmarks.links import Cluster, Link, slowest_s, step_s
from scripts.benchmarks.systems import free_port

IMAGE = (3, 32, 32)
BUCKET_MIB = 25
SMALL = 4 * 1024
"""Bytes of the sum by which latency is measured; the other sum is of a bucket of the model's own.
"""
STEPS = {"mlp": 50, "convnet": 5, "resnet18": 1}
WORKERS = (8, 16, 32, 64, 128, 256, 512, 1024)


def main() -> None:
    """Measure here, compare, and print what to expect elsewhere."""
    args = _arguments()
    given = {
        name: float(ms) / 1e3 for name, _, ms in (word.partition("=") for word in args.step_ms)
    }
    cluster = Cluster(
        args.per_node,
        Link(args.inside_latency_us / 1e6, args.inside_gb_per_s * 1e9),
        Link(args.latency_us / 1e6, args.network_gbit_per_s * 1e9 / 8),
    )
    for model in args.models.split(","):
        alone = _measure(model, 1, args.batch)
        if not args.no_check:
            _check(model, args.batch)
        if model in given:
            compute_s, origin = given[model], "given"
        elif alone["on_gpu"]:
            compute_s, origin = slowest_s(alone["alone_times_s"][0], 1), "measured here"
        else:
            compute_s = args.overhead_ms / 1e3 + alone["flop"] / (args.tflop_per_s * 1e12)
            origin = f"assumed: {alone['flop'] / 1e9:.1f} GFLOP"
        _expect(model, compute_s, alone["gradient_bytes"], cluster, origin)
    _say_what_is_assumed(args)


def _say_what_is_assumed(args: argparse.Namespace) -> None:
    print(
        f"Assumed: GPUs of {args.tflop_per_s:g} TFLOP/s in use and {args.overhead_ms:g} ms a step"
        f" besides, where none can be measured here and --step-ms does not say; {args.batch} images"
        f" for each GPU (the global batch grows); nodes of {args.per_node} GPUs, inside"
        f" {args.inside_gb_per_s:g} GB/s and {args.inside_latency_us:g} us a message, between nodes"
        f" {args.network_gbit_per_s:g} Gbit/s for each GPU and {args.latency_us:g} us; float32"
        f" gradients in buckets of {BUCKET_MIB} MiB; all but the last bucket may hide behind two"
        " thirds of the computation; data always ready; no GPU slower than the others."
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/scaling", description=__doc__)
    parser.add_argument("--models", default="mlp,convnet,resnet18")
    parser.add_argument("--batch", type=int, default=64, help="images for each GPU")
    parser.add_argument(
        "--step-ms", nargs="*", default=[], metavar="MODEL=MS", help="of a step on one GPU"
    )
    parser.add_argument(
        "--tflop-per-s", type=float, default=50.0, help="of a GPU in use; a third of an A100's TF32"
    )
    parser.add_argument(
        "--overhead-ms", type=float, default=0.5, help="of a GPU's step: launches, the optimiser"
    )
    parser.add_argument("--per-node", type=int, default=8, help="GPUs of a node")
    parser.add_argument(
        "--inside-gb-per-s", type=float, default=200.0, help="bus bandwidth within a node [GB/s]"
    )
    parser.add_argument("--inside-latency-us", type=float, default=3.0)
    parser.add_argument(
        "--network-gbit-per-s", type=float, default=100.0, help="network of each GPU [Gbit/s]"
    )
    parser.add_argument("--latency-us", type=float, default=10.0)
    parser.add_argument(
        "--no-check",
        action="store_true",
        help="do not compare with 2 and 4 workers of this machine",
    )
    return parser.parse_args()


def _check(model: str, batch: int) -> None:
    """Predict the step of 2 and of 4 workers here from links measured with 2 alone."""
    link, cores = None, usable_cpus()
    for workers in (2, 4):
        found = _measure(model, workers, batch)
        link = link or _link(found)
        # Computing and sending take the same cores.
        here = Cluster(workers, link, link, overlap=0.0, cores=None if found["on_gpu"] else cores)
        compute_s = _slowest_s(found["alone_times_s"])
        predicted = step_s(
            compute_s, found["gradient_bytes"], workers, here, bucket_bytes=BUCKET_MIB * 2**20
        )
        off, shared = (
            predicted / found["together_s"] - 1,
            " that share cores" if workers > cores else "",
        )
        print(
            f"{model}, {workers} workers here{shared}: predicted {1e3 * predicted:.2f} ms"
            f" ({1e3 * compute_s:.2f} of them computation), measured"
            f" {1e3 * found['together_s']:.2f} ms, off by {off:+.1%}",
            flush=True,
        )


def _slowest_s(times_s: Sequence[Sequence[float]]) -> float:
    """The mean of the slowest worker's seconds in each step, which all have begun together.

    Workers that share cores, or the memory's bus, are not slow independently of one another: where
    all of them can be measured at once there is nothing to assume."""
    return statistics.fmean(map(max, zip(*times_s, strict=True)))


def _link(found: Mapping[str, Any]) -> Link:
    """The link whose sums of two sizes between two workers take as long as measured, and as much of
    the cores.
    """
    sums = [(int(size), *seconds) for size, seconds in found["sums"].items()]
    (small, few_s, few_cpu_s), (large, many_s, many_cpu_s) = sorted(sums)
    bytes_per_s = (large - small) / max(many_s - few_s, 1e-9)
    cpu_s_per_byte = max(many_cpu_s - few_cpu_s, 0.0) / (large - small)
    cpu_s = max(few_cpu_s - small * cpu_s_per_byte, 0.0) / 2
    return Link(max(few_s - small / bytes_per_s, 0.0) / 2, bytes_per_s, cpu_s, cpu_s_per_byte)


def _expect(model: str, compute_s: float, num_bytes: float, cluster: Cluster, origin: str) -> None:
    print(
        f"{model}: {num_bytes / 1e6:.2f} MB of gradients, {1e3 * compute_s:.2f} ms a step on one"
        f" device ({origin})"
    )
    for workers in WORKERS:
        seconds = step_s(compute_s, num_bytes, workers, cluster, bucket_bytes=BUCKET_MIB * 2**20)
        print(
            f"  {workers:5} GPUs  {1e3 * seconds:8.2f} ms a step  {compute_s / seconds:4.0%} of"
            " linear"
        )


def _measure(model: str, workers: int, batch: int) -> dict[str, Any]:
    words = ["--model", model, "--batch", str(batch), "--steps", str(STEPS[model])]
    port, processes = free_port(), []
    for rank in range(workers):
        shared = {"WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", "scripts.benchmarks.scaling_worker", *words]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a worker that measures {model} failed")
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found
