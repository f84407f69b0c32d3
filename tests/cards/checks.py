"""What a process with soft GPUs sees: each function runs in one of its own (see test_soft_gpu)."""

import contextlib
import copy
import ctypes
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from tests import soft_gpu


@contextlib.contextmanager
def refused(kind: type[Exception], text: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        if text not in str(error):
            raise
    else:
        raise AssertionError(f"nothing was raised that says {text!r}")


def gpu(*shape: int, index: int = 0) -> torch.Tensor:
    return torch.ones(shape, device=f"cuda:{index}")


def the_visible_cards_are_listed() -> None:
    """With three cards of 1 GB, of which the last and the first are visible."""
    import pynvml

    os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-00000003,GPU-00000001"
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 3
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in (2, 0)]
    uuids = [pynvml.nvmlDeviceGetUUID(handle).removeprefix("GPU-") for handle in handles]
    seen = [torch.cuda.get_device_properties(index) for index in range(2)]
    assert [str(each.uuid) for each in seen] == uuids
    assert {each.total_memory for each in seen} == {10**9}
    assert torch.cuda.get_device_capability() == (7, 5)
    with refused(AssertionError, "Invalid device id"):
        torch.cuda.get_device_properties(2)
    with refused(torch.AcceleratorError, "invalid device ordinal"):
        gpu(1, index=2)


def without_nvml_torch_still_counts() -> None:
    """With two cards that NVML does not see."""
    import pynvml

    with refused(pynvml.NVMLError, ""):
        pynvml.nvmlInit()
    assert torch.cuda.device_count() == 2


def no_card_is_there() -> None:
    """With a count of 0."""
    assert not torch.cuda.is_available()
    with refused(RuntimeError, "No CUDA GPUs are available"):
        gpu(1)


def tensors_of_two_devices_are_refused() -> None:
    one = gpu(3)
    for other in (gpu(3, index=1), torch.ones(3)):
        for mixed in (
            lambda other=other: one + other,
            lambda other=other: torch.cat([one, other]),
            lambda other=other: nn.functional.linear(other, one.expand(2, 3)),
        ):
            with refused(RuntimeError, "Expected all tensors to be on the same device"):
                mixed()
    assert (one + torch.tensor(2)).tolist() == [3, 3, 3]  # a number may be anywhere
    assert one[torch.tensor([0, 2])].tolist() == [1, 1]  # as may indices
    assert (one.to("cuda:1") + gpu(3, index=1)).device == torch.device("cuda:1")


def an_illegal_access_stays() -> None:
    """With a fault at the fifth operator."""
    one = gpu(3)
    two = one + one
    assert two.tolist() == [2, 2, 2]
    three = two + one
    with refused(torch.AcceleratorError, "an illegal memory access was encountered"):
        three.mul_(2)
    for later in (three.cpu, torch.cuda.synchronize, lambda: gpu(1), torch.cuda.mem_get_info):
        with refused(torch.AcceleratorError, "an illegal memory access was encountered"):
            later()


def memory_ends() -> None:
    """With cards of 1 GB, of which card 1 is full."""
    kept = torch.empty(600 * 10**6, dtype=torch.uint8, device="cuda:0")
    for index, wanted in ((0, 600 * 10**6), (1, 1)):
        with refused(torch.OutOfMemoryError, "CUDA out of memory"):
            torch.empty(wanted, dtype=torch.uint8, device=f"cuda:{index}")
    assert [torch.cuda.mem_get_info(index)[1] for index in (0, 1)] == [10**9] * 2
    assert torch.cuda.mem_get_info(1)[0] == 0
    del kept
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info(0)[0] == 10**9
    assert gpu(3).pin_memory is not None


def memory_is_shared_by_processes_until_their_end() -> None:
    """With cards of 1 GB."""
    ready, say = os.pipe()
    if (child := os.fork()) == 0:
        torch.cuda.init()
        kept = torch.empty(600 * 10**6, dtype=torch.uint8, device="cuda:0")
        os.write(say, b"!")
        signal.pause()
        del kept
    os.read(ready, 1)
    assert torch.cuda.mem_get_info(0)[0] < 400 * 10**6
    assert torch.cuda.mem_get_info(1)[0] == 10**9
    with refused(torch.OutOfMemoryError, "CUDA out of memory"):
        torch.empty(600 * 10**6, dtype=torch.uint8, device="cuda:0")
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it is a zombie
    assert torch.cuda.mem_get_info(0)[0] == 10**9


def a_dead_card_has_no_context_and_a_context_takes_memory() -> None:
    """With card 1 dead, and cards of 1 GB on which a context takes 0.6."""
    with refused(torch.AcceleratorError, "busy or unavailable"):
        gpu(1, index=1)
    gpu(1)
    if os.fork() == 0:
        os._exit(0)
    assert torch.cuda.mem_get_info(0)[0] < 400 * 10**6


def a_context_finds_no_room() -> None:
    """With a context that takes more than a card has."""
    with refused(torch.AcceleratorError, "out of memory"):
        torch.cuda.set_device(0)
        gpu(1)


def new_memory_is_not_a_number() -> None:
    """With poison."""
    for kind in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert torch.empty(1000, dtype=kind, device="cuda").isnan().all()
    assert not torch.zeros(1000, device="cuda").isnan().any()


def copies_come_late() -> None:
    """With late copies."""
    source = gpu(1000)
    pinned, other = torch.zeros(2, 1000).pin_memory()
    side, third = torch.cuda.Stream(), torch.cuda.Stream()

    pinned.copy_(source, non_blocking=True)
    assert pinned.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert pinned.equal(torch.ones(1000))

    with torch.cuda.stream(side):
        pinned.copy_(source * 2, non_blocking=True)
    other.copy_(source * 3, non_blocking=True)
    torch.cuda.current_stream().synchronize()  # not the stream of the first
    assert pinned.isnan().all()
    assert other[0] == 3
    third.wait_stream(side)
    third.record_event().synchronize()
    assert pinned[0] == 2

    here = torch.zeros(1000).pin_memory()
    there = here.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    here.fill_(1)
    assert soft_gpu.count("races") == 0
    there.copy_(here, non_blocking=True)
    here.fill_(2)  # too early
    torch.cuda.synchronize()
    assert soft_gpu.count("races") == 1
    there.copy_(torch.ones(1000), non_blocking=True)  # not pinned: the call waits
    assert there.cpu().equal(torch.ones(1000))


def a_fork_cannot_use_the_driver() -> None:
    before = os.fork()
    torch.cuda.set_device(1)
    gpu(1, index=1)
    if before == 0:
        os._exit(0)  # it forked before the driver was started
    assert os.waitpid(before, 0)[1] == 0
    if (child := os.fork()) == 0:
        found = ctypes.CDLL(None).cudaFree(None)
        with refused(RuntimeError, "Cannot re-initialize CUDA in forked subprocess"):
            gpu(1)
        os._exit(found)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3  # cudaErrorInitializationError


def what_has_no_numbers_fails_by_name() -> None:
    """With an operator that the CPU lacks, a kernel that nothing replaces, an absent function."""
    import torchvision

    with refused(RuntimeError, "no numbers for aten::_masked_scale"):
        torch._masked_scale(gpu(3), gpu(3).bool(), 0.5)
    with refused(RuntimeError, "no numbers for the CUDA kernel"):
        torchvision.ops.nms(gpu(4, 4), gpu(4), 0.5)
    assert soft_gpu.count("launches") > 0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), refused(torch.AcceleratorError, "operation not supported"):
        torch.cuda.CUDAGraph().capture_begin()  # stderr says cudaStreamBeginCapture


def sync_debug_mode_warns_where_cuda_waits() -> None:
    x, positive, long = gpu(4, 4), gpu(4, 4) > 0, torch.arange(4, device="cuda")
    pinned, host = torch.ones(4, 4).pin_memory(), torch.ones(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU()).cuda()
    adam = torch.optim.Adam(model.parameters(), fused=True)
    average = torch.optim.swa_utils.AveragedModel(model)

    def step() -> None:
        loss = nn.functional.cross_entropy(model(x), long)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()

    step()  # torch makes what stays
    average.update_parameters(model)
    waiting: dict[str, Callable[[], object]] = {
        "item": lambda: x.sum().item(),
        "if": lambda: bool(x.any()),
        "tolist": lambda: long.tolist(),
        "to the host": lambda: x.cpu(),
        "from pageable memory": lambda: host.to("cuda"),
        "to pinned memory, blocking": lambda: pinned.copy_(x),
        "to another type and the host": lambda: x.to("cpu", torch.float64),
        "a new tensor": lambda: torch.tensor([1.0], device="cuda"),
        "nonzero": lambda: x.nonzero(),
        "a mask": lambda: x[positive],
        "assignment of a tensor by a mask": lambda: x.__setitem__(positive, gpu(16)),
        "indices of the host": lambda: x[torch.tensor([0, 1])],
        "masked_select": lambda: x.masked_select(positive),
        "unique": lambda: long.unique(),
        "bincount": lambda: long.bincount(),
        "repeat_interleave": lambda: long.repeat_interleave(long),
        "equal": lambda: x.equal(x),
        "the average of a model": lambda: average.update_parameters(model),
    }
    free: dict[str, Callable[[], object]] = {
        "arithmetic": lambda: (x @ x + 1).softmax(0).sum(),
        "a step": step,
        "from pinned memory": lambda: pinned.to("cuda", non_blocking=True),
        "to pinned memory": lambda: pinned.copy_(x, non_blocking=True),
        "between cards": lambda: x.to("cuda:1"),
        "to another type": lambda: x.half(),
        "a mask filled with a number": lambda: x.__setitem__(positive, 1.0),
        "where": lambda: torch.where(positive, x, 0),
        "indices of the card": lambda: x[long],
        "repeat_interleave of known size": lambda: long.repeat_interleave(long, output_size=6),
        "random numbers": lambda: torch.randn(4, device="cuda").bernoulli_(0.5),
        "sort": lambda: x.sort(),
        "a foreach norm": lambda: torch._foreach_norm([x, x]),
    }
    for expected, table in ((True, waiting), (False, free)):
        for name, act in table.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                act()
                torch.cuda.set_sync_debug_mode("default")
            found = any("called a synchronizing" in str(each.message) for each in caught)
            assert found == expected, name


def random_numbers_come_again() -> None:
    def draw() -> list[torch.Tensor]:
        x, generator = gpu(50), torch.Generator("cuda").manual_seed(1)
        drawn = [x.clone().normal_(), nn.functional.dropout(x), torch.randperm(50, device="cuda")]
        return [*drawn, torch.rand(50, device="cuda", generator=generator), x.bernoulli(0.5)]

    def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[bool]:
        return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]

    torch.manual_seed(3)
    host, state = torch.get_rng_state(), torch.cuda.get_rng_state()
    first, middle = draw(), torch.cuda.get_rng_state()
    second = draw()
    assert equal(first, second) == [False, False, False, True, False]  # True: of its own generator
    torch.cuda.set_rng_state(middle)
    assert all(equal(second, draw()))
    torch.manual_seed(3)
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert all(equal(first, draw()))
    assert torch.equal(host, torch.get_rng_state())  # nothing is drawn from the host's
    assert 5 < int((first[1] == 0).sum()) < 45
    assert first[2].sort().values.equal(torch.arange(50, device="cuda"))


# ---- collectives: each rank is a process ----


def in_ranks(count: int, act: Callable[[int], None], cards: tuple[int, ...] = ()) -> list[int]:
    """Return the exit codes of `act(rank)` in processes of one group."""
    pids = []
    for rank in range(count):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                device = torch.device("cuda", cards[rank] if cards else rank)
                torch.cuda.set_device(device)
                store = dist.FileStore(os.path.abspath("store"), count)
                soon = timedelta(seconds=20)
                dist.init_process_group(
                    "nccl", store=store, rank=rank, world_size=count, device_id=device, timeout=soon
                )
                act(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    with contextlib.suppress(FileNotFoundError):
        os.remove("store")
    return codes


def _collectives(rank: int) -> None:
    from torch.distributed import ReduceOp

    large = 700_001  # more than what goes through shared memory at once
    for kind in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64):
        x = torch.full((large,), rank + 1, device="cuda").to(kind)
        for op, expected in (
            (ReduceOp.SUM, 6), (ReduceOp.PRODUCT, 6), (ReduceOp.MIN, 1), (ReduceOp.MAX, 3),
            (ReduceOp.AVG, 2),
        ):  # fmt: skip
            if kind != torch.int64 or op != ReduceOp.AVG:
                dist.all_reduce(total := x.clone(), op)
                assert total.eq(expected).all(), (kind, op)
        dist.reduce(total := x.clone(), 1)
        assert total.eq(6 if rank == 1 else rank + 1).all()
        dist.broadcast(x, 2)
        assert x.eq(3).all()
    scaled = torch.ones(3, device="cuda") * (rank + 1)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    assert scaled.tolist() == [3, 3, 3]
    nan = torch.tensor([float("nan") if rank == 1 else 0.0], device="cuda")
    dist.all_reduce(nan, ReduceOp.MAX)
    assert nan.isnan().all()

    mine = torch.arange(large, device="cuda") + large * rank
    dist.all_gather_into_tensor(whole := mine.new_empty(3 * large), mine)
    assert whole.equal(torch.arange(3 * large, device="cuda"))
    dist.reduce_scatter_tensor(part := mine.clone(), whole)
    assert part.equal(3 * mine)
    dist.all_to_all_single(swapped := mine.new_empty(3 * large), whole)
    assert swapped.equal(mine.repeat(3))
    lists = [mine.new_empty(large) for _ in range(3)]
    dist.gather(mine, lists if rank == 0 else None)
    assert rank or torch.cat(lists).equal(whole)
    dist.scatter(part, list(whole.chunk(3)) if rank == 0 else None)
    assert part.equal(mine)

    sends = [dist.P2POp(dist.isend, mine * k, (rank + 1) % 3) for k in (1, 2)]
    got = [mine.new_empty(large) for _ in range(2)]
    receives = [dist.P2POp(dist.irecv, each, (rank - 1) % 3) for each in got]
    for work in dist.batch_isend_irecv([*sends, *receives]):
        work.wait()
    before = torch.arange(large, device="cuda") + large * ((rank - 1) % 3)
    assert got[0].equal(before)
    assert got[1].equal(2 * before)

    for ranks in ([0, 2], [1, 2]):
        group = dist.new_group(ranks)
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            dist.all_reduce(sum_of := torch.tensor(rank, device="cuda"), group=group)
            assert sum_of.item() == sum(ranks)
    objects: list[object] = [None] * 3
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    dist.barrier()


def _synchronised_norm(rank: int) -> None:
    x = torch.randn(9, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    whole = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    for parameter in whole.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    here = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole)).cuda()
    begin, end = (0, 2, 5, 9)[rank : rank + 2]  # unlike parts of the batch
    whole(x).square().sum().backward()
    here(x[begin:end].cuda()).square().sum().backward()
    for one, other in zip(whole.parameters(), here.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        dist.all_reduce(other.grad)
        torch.testing.assert_close(other.grad.cpu(), one.grad, rtol=1e-4, atol=1e-4)
    buffers = zip(whole.buffers(), here.buffers(), strict=True)
    assert all(torch.allclose(other.cpu(), one) for one, other in buffers)


def collectives_are_right() -> None:
    assert in_ranks(3, _collectives) == [0, 0, 0]


def batch_norm_is_synchronised() -> None:
    assert in_ranks(3, _synchronised_norm) == [0, 0, 0]


def two_ranks_on_one_card_are_refused() -> None:
    assert in_ranks(2, lambda rank: None, cards=(1, 1)) == [1, 1]


def unlike_collectives_are_refused() -> None:
    def act(rank: int) -> None:
        with refused(dist.DistBackendError, "unlike calls"):
            dist.all_reduce(torch.ones(2 + rank, device="cuda"))
        with refused(dist.DistBackendError, "unlike calls"):
            x = torch.ones(4, device="cuda")
            dist.all_reduce(x) if rank else dist.broadcast(x, 0)

    assert in_ranks(2, act) == [0, 0]


def a_rank_that_does_not_come_is_waited_for() -> None:
    """With a limit of a second for NCCL."""

    def act(rank: int) -> None:
        if rank == 0:
            with refused(dist.DistBackendError, "waited in vain"):
                dist.all_reduce(torch.ones(2, device="cuda"))

    assert in_ranks(2, act) == [0, 0]


def data_parallel_has_its_cards_in_one_process() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    model(x).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    nn.DataParallel(model.cuda(), [0, 1, 2])(x.cuda()).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        torch.testing.assert_close(parameter.grad.cpu(), gradient)
