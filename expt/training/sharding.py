"""A model whose parameters, gradients and optimizer states are sharded by torch's `fully_shard`.

Parameters are DTensors; each worker holds a shard of them (rows of the first dimension). A unit of
the model is gathered for its forward and its backward pass and resharded after it, so each forward
pass is a collective.
"""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from expt.data.loading import Batch, leaves, named_leaves, to_device
from expt.errors import ConfigError, listed
from expt.models.blocks import CONTAINERS, blocks, matching
from expt.runs.checkpoint import Like, map_leaves
from expt.training import collectives, random_state
from expt.training.collectives import Worker, from_rank_0, max_across_workers, sum_across_workers

LEAST_SHARE = 0.02
"""Share of a model's numbers from which a layer outside of all blocks is a unit by itself."""


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor, without importing that class."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return this worker's part of `tensor`: all of it unless it is sharded."""
    part: Any = tensor
    return cast(Tensor, part.to_local()) if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all of `tensor`; a collective if it is sharded, on the device of the workers."""
    part: Any = tensor
    if not is_sharded(tensor):
        return tensor
    return cast(Tensor, part.to(part.device_mesh.device_type).full_tensor())  # it may be offloaded


def shard_as(pattern: Any, full: Tensor) -> Tensor:
    """Return this worker's shard of `full`, placed as `pattern` is.

    Return `full` itself where `pattern` is None, whole, or of another shape.
    """
    if pattern is None or not is_sharded(pattern) or pattern.shape != full.shape:
        return full
    from torch.distributed.tensor import distribute_tensor

    given, mesh = full.to(local(pattern).device), pattern.device_mesh
    found = distribute_tensor(given, mesh, pattern.placements, src_data_rank=None)
    return found.clone()  # it may be a view of the whole


def sum_over_shards(values: Tensor, shards: int, world_size: int) -> Tensor:
    """Return the sum of each shard's `values`; a collective."""
    return sum_across_workers(values) / (world_size // shards)  # replicas have the same shard


def shard(
    module: nn.Module,
    worker: Worker,
    *,
    shards: int,
    units: Sequence[nn.Module],
    reshard_after_forward: bool,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Shard `module` over groups of `shards` neighboring workers; the groups are replicas.

    All workers get rank 0's parameters, which may be meta tensors on the others; buffers lie on the
    device already. `units` are gathered one at a time, the rest with the root, and filled just
    before they are sharded: no device ever has the whole model. Parameters travel and compute in
    `param_dtype`, gradients are averaged in `reduce_dtype`; None is the parameters' own. Shards
    keep attributes of their parameters, such as `weight.no_decay = True`.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = _mesh(worker.device.type, worker.world_size // shards, shards, dist.group.WORLD)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    attributes = {name: dict(vars(one)) for name, one in module.named_parameters()}
    for unit in [*units, module]:
        fill([one for one in unit.parameters() if not is_sharded(one)], worker)
        # The root's own parameters are needed again at once, at the start of the backward pass.
        after = None if unit is module and reshard_after_forward else reshard_after_forward
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=after)
    if worker.device.type == "cpu":
        for part in units_of(module).values():
            part.set_force_sum_reduction_for_comms(True)  # not every gloo knows how to average
    for name, parameter in module.named_parameters():
        for key, value in attributes[name].items():
            is_tensor = isinstance(value, Tensor)
            vars(parameter)[key] = shard_as(parameter, value) if is_tensor else value


@functools.cache  # with each mesh of replicas come process groups, which stay
def _mesh(device_type: str, replicas: int, shards: int, _: dist.ProcessGroup | None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    if replicas == 1:
        return init_device_mesh(device_type, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (replicas, shards), mesh_dim_names=("replicate", "shard"))


@torch.no_grad()
def fill(tensors: Sequence[Tensor], worker: Worker) -> None:
    """Give parameters or buffers rank 0's values on the device; a collective."""
    full = [
        torch.empty(one.shape, dtype=one.dtype, device=worker.device)
        if worker.rank or one.is_meta
        else one.detach().to(worker.device).contiguous()
        for one in tensors
    ]
    collectives.broadcast(full)
    for one, values in zip(tensors, full, strict=True):
        if not one.is_meta:
            one.data = values
        else:  # which takes no data of another device
            new = values.detach()  # torch swaps no tensor that a thread of gloo may still hold
            if isinstance(one, nn.Parameter):
                new = nn.Parameter(new, requires_grad=one.requires_grad)
            torch.utils.swap_tensors(one, new)


def build_empty(make: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """Build a module by `make` with meta tensors, or with real ones where that fails."""
    before = random_state.state_dict(device)
    try:
        with torch.device("meta"):
            module = make()
        known, parts = {"_parameters", "_buffers", "_modules"}, module.modules()
        own = [  # attributes that torch does not know of
            {name: value for name, value in vars(part).items() if name not in known}
            for part in (*parts, *module.parameters())
        ]
        if not any(tensor.is_meta for _, tensor in named_leaves(own, "")):
            return module
    except Exception:  # many classes: its constructor reads a meta tensor
        pass
    random_state.load_state_dict(before, device)
    return make()


def units_of(module: nn.Module) -> dict[str, Any]:
    """Return the units of a sharded `module` by name, itself included."""
    from torch.distributed.fsdp import FSDPModule

    return {name: part for name, part in module.named_modules() if isinstance(part, FSDPModule)}


def outline(module: nn.Module) -> nn.Module:
    """Return a copy of `module`, which is not sharded yet, with meta parameters."""
    empty = {
        id(one): nn.Parameter(torch.empty_like(one, device="meta"), requires_grad=one.requires_grad)
        for one in module.parameters()
    }
    return copy.deepcopy(module, cast("dict[int, Any]", empty))


def choose_units(module: nn.Module, wrap: str | int | Sequence[str]) -> list[nn.Module]:
    """Return the modules of `module` that are gathered one at a time, the innermost first.

    "auto" takes its blocks, and large layers outside of them; a number is the least size of a unit;
    regular expressions match whole names of modules. Raises ConfigError for an expression without
    a match, or a module that can be no unit.
    """
    if isinstance(wrap, str):
        chosen = _blocks_and_large_layers(module)
    elif isinstance(wrap, int):
        chosen = _with_size(module, wrap)
    else:
        chosen = _matching(module, wrap)
    return [chosen[name] for name in sorted(chosen, key=lambda name: -name.count("."))]


def own_parameters(module: nn.Module, units: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Return the parameters gathered with each unit, in the model's order."""
    taken = set[nn.Parameter]()
    own: dict[nn.Module, list[nn.Parameter]] = {}
    for unit in units:
        own[unit] = [parameter for parameter in unit.parameters() if parameter not in taken]
        taken.update(own[unit])
    return [own[part] for part in module.modules() if part in own]


def _blocks_and_large_layers(module: nn.Module) -> dict[str, nn.Module]:
    chosen = blocks(module)
    least = LEAST_SHARE * num_parameters(module)
    within_blocks = tuple(f"{name}." for name in chosen)
    for name, layer in module.named_modules():
        is_layer = name and next(layer.children(), None) is None
        if is_layer and not name.startswith(within_blocks) and num_parameters(layer) >= least:
            chosen[name] = layer
    # Attention computes with the weights of its layers by itself.
    attention = nn.MultiheadAttention
    within_attention = tuple(
        f"{name}." for name, part in module.named_modules() if isinstance(part, attention)
    )
    return {
        name: unit
        for name, unit in chosen.items()
        if not _shared_name(module, name) and not name.startswith(within_attention)
    }


def _with_size(module: nn.Module, least: int) -> dict[str, nn.Module]:
    chosen: dict[str, nn.Module] = {}

    def rest(name: str, part: nn.Module) -> int:
        """Choose within `part`; return its numbers that are in no unit."""
        size = sum(parameter.numel() for parameter in part.parameters(recurse=False))
        size += sum(rest(f"{name}.{at}".lstrip("."), one) for at, one in part.named_children())
        can_be = name and not isinstance(part, CONTAINERS) and not _shared_name(module, name)
        if size < least or not can_be:
            return size
        chosen[name] = part
        return 0

    rest("", module)
    if not chosen:
        raise ConfigError(
            f"sharding.wrap={least}: no module within the model has so many parameters, of"
            f" {num_parameters(module)} in all; use fewer, or sharding.wrap=auto"
        )
    return chosen


def _matching(module: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        found = matching(module, [pattern], "sharding.wrap")
        found = {name: part for name, part in found.items() if num_parameters(part)}
        if not found:
            raise ConfigError(
                f"sharding.wrap=[{pattern}]: matches only modules without parameters; leave it out"
            )
        chosen |= found
    for name in chosen:
        if shared := _shared_name(module, name):
            raise ConfigError(
                f"sharding.wrap: {name} shares {shared} with another module, and both must be"
                " gathered together; leave it out"
            )
    return chosen


def _shared_name(module: nn.Module, unit: str) -> str | None:
    """Return the name of a parameter in `unit` that is outside of it, too."""
    inside = set(module.get_submodule(unit).parameters())
    named = module.named_parameters(remove_duplicate=False)
    return next(
        (name for name, one in named if one in inside and not name.startswith(f"{unit}.")), None
    )


def num_parameters(module: nn.Module) -> int:
    """Return the number of elements of all parameters of a module."""
    return sum(one.numel() for one in module.parameters())


def in_step(
    batches: Iterable[Batch], module: nn.Module, blank: Callable[[int], Batch]
) -> Iterator[Batch]:
    """Yield a worker's batches, then weightless ones by `blank`(samples) until all workers end."""
    iterator = iter(batches)
    try:
        while True:
            batch = next(iterator, None)
            if not max_across_workers([float(batch is not None)])[0]:
                return
            yield blank(1)._replace(weightless=True) if batch is None else batch
    finally:
        for part in units_of(module).values():
            part.reshard()  # as a backward pass would have done


class Unused:
    """The parameters and units of a sharded model that each step uses, on one worker.

    A mixture of experts may use a parameter on some workers only: those without a gradient give
    zeros to the mean. A parameter that no worker has used gets no gradient, as with
    DistributedDataParallel. All workers must use the same units: they gather them together.
    """

    def __init__(self, module: nn.Module, device: torch.device, compiled: bool) -> None:
        self._device = device
        self._parameters = {
            name: one for name, one in module.named_parameters() if one.requires_grad
        }
        self._used, self._watched, self._units = set[str](), set[str](), list[str]()
        self._gives_zeros = hasattr(module, "set_reduce_scatter_unused_params")  # since torch 2.14
        for name, unit in units_of(module).items():
            if self._gives_zeros:
                unit.set_reduce_scatter_unused_params(True, recurse=False)
            watch = functools.partial(self._watch, name)
            unit.register_forward_pre_hook(torch.compiler.disable(watch) if compiled else watch)

    def _watch(self, prefix: str, unit: nn.Module, _: Any) -> None:
        """Note that `unit` is called, and when a parameter of it, one tensor for good, is used."""
        if torch.is_grad_enabled():  # not in an evaluation
            self._units.append(prefix)
        for name, parameter in unit.named_parameters(prefix):
            if name in self._parameters and name not in self._watched and not is_sharded(parameter):
                self._watched.add(name)
                parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: self._used.add(name)
                )

    @torch.no_grad()
    def drop(self) -> None:
        """Drop gradients of parameters that no worker has used since the last call; a collective.

        Raises ConfigError where workers called other units, or where some used a parameter and
        torch is too old to give zeros.
        """
        used, units = [name in self._used for name in self._parameters], self._units
        self._used, self._units = set[str](), list[str]()
        print_ = zlib.crc32("\n".join(units).encode()) % 2**24  # exact in float32
        mine = torch.tensor([print_, -print_, *used], dtype=torch.float32)
        by_any = to_device(mine, self._device)
        dist.all_reduce(by_any, dist.ReduceOp.MAX)
        if all(used) and self._device.type == "cuda":  # so that nobody waits for the device
            return
        highest, negated, *by_others = by_any.tolist()
        if highest != -negated:
            raise ConfigError(
                f"model: workers call other layers in a step, here {listed(filter(None, units))}:"
                " the weights of these are gathered from all workers, which must call the same in"
                " the same order; name layers that every batch calls in sharding.wrap, such as"
                " those around experts, or use strategy=ddp with ddp.find_unused_parameters=true"
            )
        for name, here, anywhere in zip(self._parameters, used, by_others, strict=True):
            if not anywhere:
                self._parameters[name].grad = None
            elif not here and not self._gives_zeros:
                raise ConfigError(
                    f"the parameter {name} was used by some workers only in a step, which torch"
                    f" {torch.__version__} cannot do when sharded; use a newer torch, or"
                    " strategy=ddp with ddp.find_unused_parameters=true"
                )


def gather_state(state: Any, *, keep: bool) -> Any:
    """Return `state` with whole tensors on the CPU, or none without `keep`; a collective."""

    def kept(_: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        full = whole(value.detach())
        return full.to("cpu", copy=not is_sharded(value)) if keep else torch.empty(0)

    return map_leaves(kept, state)


def scatter_state(state: Any, like: Like, device: torch.device) -> Any:
    """Return rank 0's `state` on every worker, with shards where `like` gives a sharded tensor.

    Other workers pass None; whole tensors are on the CPU. A collective, in which each worker holds
    one whole tensor at a time on the device.
    """
    shape = map_leaves(lambda _, one: one.to("meta") if isinstance(one, Tensor) else one, state)
    next_of_rank_0 = leaves(state)

    def received(key: str, empty: Any) -> Any:
        if not isinstance(empty, Tensor):
            return empty
        mine = next(next_of_rank_0, None)
        if mine is None:
            full = torch.empty(empty.shape, dtype=empty.dtype, device=device)
        else:  # contiguous: the memory is sent as it lies
            full = mine.to(device, copy=True).contiguous()
        if dist.is_initialized():
            dist.broadcast(full, src=0)
        found = shard_as(like(key), full)
        return found if is_sharded(found) else found.cpu()

    return map_leaves(received, from_rank_0(shape))
