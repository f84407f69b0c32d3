"""How long a step takes on n workers, from what one needs and what the links carry.

Numbers in, numbers out.

An all-reduce of S bytes among n in a ring moves 2(n-1)/n S bytes through each link in 2(n-1)
messages; in a tree, 2S bytes in 2 log2(n) messages, see nccl-tests' doc/PERFORMANCE.md and Thakur
et al. 2005, "Optimization of Collective Communication Operations in MPICH". DistributedDataParallel
starts on a bucket of gradients as soon as backward has filled it, see Li et al. 2020, "PyTorch
Distributed": all but the last bucket can hide behind the rest of backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BACKWARD = 2 / 3
"""Backward's share of a step's computation: two products of matrices where forward has one."""


@dataclass(frozen=True)
class Link:
    """What joins two devices: seconds a message takes whatever its size, and bytes per second each
    way.
    """

    latency_s: float
    bytes_per_s: float
    cpu_s: float = 0.0
    """Of a core's time that each message takes from computation on either side, and, below, each
    byte.
    """
    cpu_s_per_byte: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Nodes of `per_node` devices; every device has its share of the node's network."""

    per_node: int
    inside: Link
    network: Link
    """As one device sees it."""
    overlap: float = 1.0
    """Share of backward during which gradients can travel; 0 where computing and sending take the
    same cores.
    """
    cores: int | None = None
    """Those that all workers share, where sending takes their time; None where it takes none, as on
    GPUs.
    """


def all_reduce_s(num_bytes: float, workers: int, link: Link) -> float:
    """Seconds by the faster of ring and tree."""
    if workers < 2:
        return 0.0
    ring = (
        2 * (workers - 1) * link.latency_s
        + 2 * (workers - 1) / workers * num_bytes / link.bytes_per_s
    )
    tree = 2 * math.ceil(math.log2(workers)) * link.latency_s + 2 * num_bytes / link.bytes_per_s
    return min(ring, tree)


def all_reduce_cpu_s(num_bytes: float, workers: int, link: Link) -> float:
    """Seconds of a core that the ring takes from each worker."""
    return (
        2 * (workers - 1) * link.cpu_s
        + 2 * (workers - 1) / workers * num_bytes * link.cpu_s_per_byte
    )


def gather_s(num_bytes: float, workers: int, link: Link) -> float:
    """Seconds until each has all parts of what each has a part of, or the other way round, its part
    of the sum.
    """
    if workers < 2:
        return 0.0
    return (workers - 1) * link.latency_s + (workers - 1) / workers * num_bytes / link.bytes_per_s


def sharded_s(num_bytes: float, workers: int, cluster: Cluster) -> float:
    """Seconds of `gather_s` over nodes: each device's part between these, and all of it within
    them.
    """
    inside = min(workers, cluster.per_node)
    nodes = math.ceil(workers / cluster.per_node)
    return gather_s(num_bytes, inside, cluster.inside) + gather_s(
        num_bytes / inside, nodes, cluster.network
    )


def slowest_s(times_s: Sequence[float], workers: int) -> float:
    """What a step takes that all `workers` join, each of which needs one of the measured `times_s`
    by chance.

    The expected largest of independent draws from them (David and Nagaraja 2003, "Order
    Statistics")."""
    ordered, count = sorted(times_s), len(times_s)
    shares = (
        (((rank + 1) / count) ** workers - (rank / count) ** workers) for rank in range(count)
    )
    return sum(share * seconds for share, seconds in zip(shares, ordered, strict=True))


def bucket_s(num_bytes: float, workers: int, cluster: Cluster) -> float:
    """Seconds for one bucket: summed within the nodes, a share of it by each device between them,
    and spread again.
    """
    inside = min(workers, cluster.per_node)
    nodes = math.ceil(workers / cluster.per_node)
    if cluster.cores is not None:
        turns = max(
            workers / cluster.cores - 1, 0
        )  # a worker's message waits while the others have its core
        cpu_s = all_reduce_cpu_s(num_bytes, workers, cluster.inside)
        return all_reduce_s(num_bytes, workers, cluster.inside) + turns * cpu_s
    return all_reduce_s(num_bytes, inside, cluster.inside) + all_reduce_s(
        num_bytes / inside, nodes, cluster.network
    )


def step_s(
    compute_s: float, gradient_bytes: float, workers: int, cluster: Cluster, *, bucket_bytes: float
) -> float:
    """Seconds of a step of `compute_s` on one device, with as much work for each of `workers`."""
    if workers < 2:
        return compute_s
    buckets = max(1, math.ceil(gradient_bytes / bucket_bytes))
    one = bucket_s(gradient_bytes / buckets, workers, cluster)
    hidden = min(
        (buckets - 1) * one, cluster.overlap * BACKWARD * compute_s * (buckets - 1) / buckets
    )
    return compute_s + buckets * one - hidden
