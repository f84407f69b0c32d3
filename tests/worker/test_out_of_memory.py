"""gradient_accumulation=auto halves what does not fit; what is told of an error is of use."""

import copy
import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from expt.data.loading import Batch
from expt.errors import ConfigError, OutOfMemory, RunFailed, sized_by
from expt.training.strategy import Fitting
from expt.worker import build, comparison
from expt.worker.diagnosis import in_words, lost_peers, where_stuck
from tests import on_cards
from tests.conftest import Configured, Trained
from tests.facade import Capture, Patch, as_typed
from tests.ranks import worker_of
from tests.worker.conftest import ALONE, TrainAlone, TrainTogether, assert_same, stop_at
from tests.worker.odd_models import Hungry

MODELS = "tests.worker.odd_models"
UNEQUAL = "unequal shares of 2 workers"
SHORT = as_typed("epochs=1 max_steps=9 log_every=1 tensorboard.images=false")
AUTO = "gradient_accumulation=auto"


def of(name: str, **arguments: object) -> tuple[str, ...]:
    given = (f"+model.{key}={value}" for key, value in arguments.items())
    return ("~model", f"+model._target_={MODELS}.{name}", *given)


@pytest.mark.slow
def test_a_run_is_that_with_the_number_that_fits(train_together: TrainTogether) -> None:
    """Also of rank 0, which has room for its whole share."""
    number = (*of("HungrySequence", most=1000), "gradient_accumulation=4")
    given = train_together(2, *SHORT, *number, name="number")
    for rank, where in ((1, "forward"), (0, "backward")):
        model = of("HungrySequence", most=8, rank=rank, where=where)
        found = train_together(2, *SHORT, *model, AUTO, name=where)
        assert found.state()["micro_batch_size"] == 8
        assert_same(found, given)


@pytest.mark.slow
def test_inputs_and_buffers_that_a_model_changes_are_as_before(train_alone: TrainAlone) -> None:
    found = train_alone(*SHORT, *of("Spoiling", most=8), AUTO, name="auto")
    number = (*of("Spoiling", most=1000), "gradient_accumulation=8")
    assert_same(found, train_alone(*SHORT, *number, name="number"))
    assert found.state()["micro_batch_size"] == 8


def test_weights_that_a_forward_pass_changes_are_not_restored(train_alone: TrainAlone) -> None:
    with pytest.raises(ConfigError, match=f"^{AUTO}: the model changes first.weight"):
        train_alone(*SHORT, *of("Clipping", most=8), AUTO)


def test_the_curve_of_a_plain_loop(
    train_together: TrainTogether, train_alone: TrainAlone, configured: Configured
) -> None:
    """From the fifth step on, and in an epoch's last batch, which is smaller."""
    words = (
        *of("Hungry", most=8, rank=1, begin=5),
        *as_typed("epochs=1 log_every=1 drop_last=false"),
        *as_typed("optimizer.lr=0.1 optimizer.momentum=0.0"),
    )
    done = train_together(2, *words, AUTO, name="two")
    begun: list[dict[str, Any]] = []
    train_alone(
        *words,
        "max_steps=1",
        before=lambda run: begun.append(copy.deepcopy(run.learner.module.state_dict())),
    )
    model, losses = Hungry(1000).to(ALONE.device), []
    model.load_state_dict(begun[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in build.build_data(configured(*words), ALONE).train.epoch(1):
        loss = functional.cross_entropy(model(batch.inputs), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(losses) == 21
    found = [value for _, value in done.curve("running/loss")]
    assert found == pytest.approx(losses, abs=1e-5)


@pytest.mark.slow
def test_a_resumed_run_keeps_what_was_found(train_alone: TrainAlone) -> None:
    """It has room for all, and would compute other statistics with it."""
    words = (*SHORT, *of("HungrySequence", most=8, begin=5), AUTO)
    stopped = train_alone(*words, name="half", before=stop_at(7))
    resumed = train_alone(
        *(*SHORT, *of("HungrySequence", most=1000), AUTO),
        name="half",
        source=stopped.run.paths.last,
    )
    assert_same(resumed, train_alone(*words, name="whole"))


@pytest.mark.slow
def test_parameters_that_a_worker_did_not_use(train_together: TrainTogether) -> None:
    words = (*SHORT, *of("Mixture"), "batch_size=4", "optimizer.weight_decay=0.5")
    find = "ddp.find_unused_parameters=true"
    plain = train_together(2, *words, find, name="plain")
    found = train_together(2, *words, find, AUTO, name="auto")
    assert "micro_batch_size" not in found.state()
    assert_same(found, plain)
    with pytest.raises(EOFError):  # the ranks end with the error
        train_together(2, *words, AUTO, name="refused")


def test_layers_that_wait_for_others_are_refused() -> None:
    module, two = nn.SyncBatchNorm(3), dataclasses.replace(ALONE, world_size=2)
    optimizer = torch.optim.SGD(module.parameters())
    with pytest.raises(ConfigError, match=f"^{AUTO}: "):
        Fitting(module, 2, worker=two, optimizer=optimizer, allows_unused=False)


@pytest.mark.parametrize("number", ["auto", "2"])
def test_state_from_batch_to_batch_is_refused(number: str, configured: Configured) -> None:
    key = f"gradient_accumulation={number}"
    config = configured(key, "task={_target_: tests.worker.stateful.Saved}")
    with pytest.raises(ConfigError, match=f"^{key}: "):
        build.build_learner(config, build.build_data(config, ALONE), ALONE)


def test_a_command(trained: Trained, capfd: Capture) -> None:
    """Where one sample has no room it ends, and no worker waits for the one that has none."""
    words = (*SHORT, AUTO, "world_size=2")
    done = trained(*words, *of("Hungry", most=20, rank=1, begin=5), name="halved")
    assert done.result["micro_batch_size"] == 16
    assert capfd.readouterr().err.count(AUTO) == 1
    with pytest.raises(OutOfMemory, match="rank 1 of 2"):
        trained(*words, *of("Hungry", most=0, rank=1), name="failed")


@pytest.mark.parametrize("words", [("world_size=1",), ("world_size=2", "+model.rank=1")], ids=str)
def test_out_of_memory_with_batch_norm(words: tuple[str, ...], trained: Trained) -> None:
    """The lack of memory is reported, also by a worker that has enough."""
    with pytest.raises(OutOfMemory, match="2 at a time") as raised:
        trained(*SHORT, AUTO, *of("HungrySequence", most=1), *words)
    assert "gradient_accumulation=" not in str(raised.value)


SETTING = r"(?:try|or) ([a-z_]+)="


class Starved(nn.Module):
    """Lacks memory where it is built, updated or evaluated, however few the samples."""

    def __init__(self, where: str, num_classes: int) -> None:
        super().__init__()
        self.where, self.layer = where, nn.Linear(64, num_classes)
        if where == "built":
            raise torch.OutOfMemoryError("CUDA out of memory, on purpose")

    def forward(self, images: Tensor) -> Tensor:
        if self.where == "evaluated" and not self.training:
            raise torch.OutOfMemoryError("CUDA out of memory, on purpose")
        outputs: Tensor = self.layer(images.flatten(1))
        return outputs


class StarvedSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise torch.OutOfMemoryError("CUDA out of memory, on purpose")


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (("built",), ["strategy"]),
        (("updated", f"optimizer={{_target_: {__name__}.StarvedSGD, lr: 0.1}}"), ["strategy"]),
        (("evaluated",), ["amp", "strategy"]),
        (("evaluated", "amp=true"), ["strategy"]),
    ],
    ids=str,
)
def test_advice_is_of_what_memory_ran_out_for(
    words: tuple[str, ...],
    settings: list[str],
    train_alone: TrainAlone,
    configured: Configured,
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(comparison, "compare", lambda *_: None)
    where, *more = words
    model = ("~model", f"+model._target_={__name__}.Starved", f"+model.where={where}")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train_alone("max_steps=1", *model, *more)
    config = configured("world_size=2", *model, *more)
    assert re.findall(SETTING, str(in_words(raised.value, config))) == settings
    alone = dataclasses.replace(config, world_size=1)
    told = str(in_words(raised.value, alone))
    assert ("a smaller model" in told) == ("amp" not in settings)
    told = str(in_words(raised.value, alone, trains=False))
    more = ["gpus"] * on_cards.ON
    assert re.findall(SETTING, told) == [*(name for name in settings if name == "amp"), *more]


def test_evaluations_of_a_sharded_model_are_advised_to_be_smaller(configured: Configured) -> None:
    """They are not halved: all workers call it together."""
    with pytest.raises(torch.OutOfMemoryError) as raised, sized_by("eval_batch_size", 72):
        raise torch.OutOfMemoryError("CUDA out of memory, on purpose")
    assert "eval_batch_size=36" in str(in_words(raised.value, configured("world_size=2")))


def test_torch_names_the_operation_whose_gradient_is_nan(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="SqrtBackward0"):
        trained(*SHORT, *of("Undefined"), "detect_anomaly=true", "world_size=1")
    log = (tmp_path / "run/logs/0/0/stderr.log").read_text()
    assert "odd_models.py" in log.partition("Traceback of forward call")[2]


@pytest.mark.parametrize(
    ("batch_size", "world_size", "parts"), [(66, 2, 1), (100, 1, 1), (54, 1, 3)]
)
def test_what_is_to_be_tried_where_memory_is_short_is_accepted(
    batch_size: int, world_size: int, parts: int, configured: Configured
) -> None:
    now = [f"batch_size={batch_size}", f"world_size={world_size}", f"gradient_accumulation={parts}"]
    told = str(in_words(torch.OutOfMemoryError("no memory"), configured(*now)))
    suggested = re.findall(r"(?:try|or) (\w+=\d+)", told)
    assert len(suggested) == 2
    for word in suggested:
        config = configured(*now, word)
        at_a_time = config.batch_size / config.world_size / config.micro_batches
        assert at_a_time <= batch_size / world_size / parts / 2


@pytest.mark.parametrize(
    ("batch_size", "parts", "now", "fewer"),
    [(1, 1, 1, ()), (2, 1, 1, ()), (3, 1, 2, ("3", "2")), (6, 2, 3, ("3", "4"))],
)
def test_the_largest_share_of_a_batch_is_named_where_gpus_share_it_out(
    batch_size: int, parts: int, now: int, fewer: tuple[str, ...], configured: Configured
) -> None:
    config = dataclasses.replace(
        configured(f"batch_size={batch_size}", f"gradient_accumulation={parts}", "world_size=1"),
        strategy="dp",
        gpus=2,
    )
    told = str(in_words(torch.OutOfMemoryError("no memory"), config))
    assert f"is {now} sample" in told
    assert re.findall(r"(?:try|or) \w+=(\d+)", told) == [*fewer]


@pytest.mark.parametrize("free", [0, 11])
def test_memory_held_by_others(free: int, configured: Configured, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 4 * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * 2**30, 16 * 2**30))
    told = str(in_words(torch.OutOfMemoryError("no memory"), configured()))
    assert ("other processes hold 12.0 of 16.0 GiB" in told) == (free == 0)
    assert ("batch_size=32" in told) == (free > 0)


def nccl(text: str) -> dist.DistBackendError:
    return dist.DistBackendError(f"NCCL error in: a.cpp:3690, unhandled system error\n{text}")


NO_ROOM = "Error: failed to create shared memory file /dev/shm/nccl-a1, error No space left"
FULL = "raise OSError(28, 'No space left on device')"
LOCKS = compile(FULL, "/usr/lib/python3/multiprocessing/synchronize.py", "exec")
EXPLAINED: dict[str, tuple[Exception | Callable[[], object], type[Exception], str]] = {
    # each with what is said of it
    "a card": (torch.AcceleratorError("CUDA error: out of memory\nSearch"), OutOfMemory, "CUDA er"),
    "a card, by NCCL": (nccl("Cuda failure 2 'out of memory'"), OutOfMemory, "Cuda failure"),
    "Python": (MemoryError(), OutOfMemory, ""),
    "torch": (torch.OutOfMemoryError(), OutOfMemory, ""),
    "locks of loaders": (lambda: exec(LOCKS), RunFailed, "/dev/shm: No space left on d.*; mount"),
    "NCCL": (nccl(f"Last error:\n{NO_ROOM} (28)"), RunFailed, f"/dev/shm: {NO_ROOM} .*; mount"),
    "a single sample": (
        lambda: nn.BatchNorm1d(3)(torch.zeros(1, 3)),
        ConfigError,
        r"batch_size=2: .*more than 1 value per channel.*drop_last=true",
    ),
    "a method of the model": (
        lambda: nn.DataParallel(nn.Linear(1, 1)).encode(1),  # type: ignore[operator]
        ConfigError,
        r"model\..*world_size=1",
    ),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_an_error_is_explained(name: str, configured: Configured) -> None:
    failing, kind, said = EXPLAINED[name]
    if not isinstance(failing, Exception):
        with pytest.raises(Exception) as raised:
            failing()
        failing = raised.value
    found = in_words(failing, configured("batch_size=2"))
    assert isinstance(found, kind)
    assert re.match(said, str(found))


def test_others_are_not_taken_for_a_lack_of_shared_memory(configured: Configured) -> None:
    with pytest.raises(OSError, match="No space left") as raised:
        exec(compile(FULL, "/home/me/net.py", "exec"))
    of_a_kernel = RuntimeError("out of resource: shared memory, Required: 131072, limit: 101376")
    for error in (raised.value, of_a_kernel):
        assert "/dev/shm" not in str(in_words(error, configured()))


@pytest.mark.parametrize(
    "text",
    [
        "NCCL communicator was aborted on rank 1.",
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process"
            " exiting prematurely."
        ),
    ],
)
def test_a_lost_peer_in_the_words_of_nccl(text: str) -> None:
    worker = worker_of(1, 2)
    assert "rank 1 of 2 on " in str(lost_peers(nccl(text), worker))
    assert lost_peers(nccl("invalid usage"), worker) is None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no notes")
def test_what_was_given_stands_beside_torchs_own_words(configured: Configured) -> None:
    def step(batch: Batch) -> None:
        nn.Linear(7, 2)(batch.inputs["row"])

    batch = Batch({"row": torch.zeros(4, 5)}, torch.zeros(4, dtype=torch.int64), 4)
    with pytest.raises(RuntimeError) as caught:
        step(batch)
    told = in_words(caught.value, configured("model=convnet"))
    assert told is caught.value
    (note,) = vars(told)["__notes__"]
    for part in ("of model=convnet", "inputs['row'] float32 [4, 5]", "targets int64 [4]"):
        assert part in note


@pytest.mark.parametrize(("samples", "of_all"), [(4, 8), (4, 7)])
def test_unequal_shares_are_named_where_a_worker_fails_or_waits(
    samples: int, of_all: int, configured: Configured
) -> None:
    batch, config = Batch(torch.zeros(samples, 2), None, of_all), configured("world_size=2")
    assert (UNEQUAL in where_stuck(config)) == (of_all == 7)
    with pytest.raises(RuntimeError) as raised:
        batch.inputs.view(3)
    noted = in_words(raised.value, config)
    assert (UNEQUAL in "".join(vars(noted)["__notes__"])) == (of_all == 7)
