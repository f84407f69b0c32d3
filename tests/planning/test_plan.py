"""What a run is said to take before it runs."""

import resource

import pytest
import torch
from torch import Tensor, nn

from expt.command import plan as command
from expt.config.parse import parse
from expt.config.schema import RunConfig
from expt.errors import ConfigError
from expt.planning.plan import Footprint, footprints
from tests.command.test_json import document
from tests.composing import composed
from tests.conftest import Typed
from tests.facade import Capture, machine

LM = ("model=transformer", "task=language_model", "dataset=text", "dataset.root=nowhere")
SMALL = ("model.layers=3", "model.width=64", "model.heads=2", "optimizer=adamw", "batch_size=8")
PARAMETERS = 64 * 16 + 16 + 16 * 10 + 10  # of an MLP of the digits with 16 hidden units

# torch starts a process's autograd threads at its first backward pass, where a device is known that
# needs some. Fake tensors make one known; were theirs the first, no later test could fork ranks.
torch.ones(1, requires_grad=True).sum().backward()


class Decides(nn.Module):
    """Reads a number of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.layer(images.flatten(1))
        return found if float(found.sum()) > 0 else -found


class Double(nn.Sequential):
    """Computes in float64."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10, dtype=torch.float64))


def config(*words: str, gpus: int = 8) -> RunConfig:
    return parse(composed(*words), machine(gpus))


def plans(*words: str) -> dict[tuple[str, bool], Footprint]:
    return {(plan.strategy, plan.checkpointed): plan for plan in footprints(config(*words)).plans}


def test_an_mlp_takes_what_its_layers_say() -> None:
    found = plans("model.hidden=[16]", "optimizer=adam", "gpus=4", "batch_size=4096")
    ddp, fsdp = found["ddp", False], found["fsdp", False]
    assert ddp.parameters == ddp.gradients == 4 * PARAMETERS
    assert ddp.states == pytest.approx(2 * ddp.gradients, rel=0.02)  # and a count of steps each
    assert (fsdp.gradients, fsdp.states) == (ddp.gradients / 4, ddp.states / 4)
    inputs, hidden, logits = (1024 * 4 * width for width in (64, 16, 10))
    assert inputs + hidden + logits < ddp.activations < 2 * inputs + 4 * hidden + 6 * logits


@pytest.mark.slow
def test_activations_shrink_with_checkpointing_and_micro_batches() -> None:
    words = (*LM, *SMALL, "gpus=1", "dataset.context=64")
    found, parts = plans(*words), plans(*words, "gradient_accumulation=4")
    assert found["ddp", True].activations < 0.8 * found["ddp", False].activations
    assert parts["ddp", False].activations < 0.3 * found["ddp", False].activations


def test_a_moving_average_is_counted_and_offloaded_states_are_not() -> None:
    words = ("optimizer=adam", "gpus=1")
    plain, more = plans(*words)["ddp", False], plans(*words, "ema=0.9", "offload=cpu")["ddp", False]
    assert more.parameters == 2 * plain.parameters
    assert (plain.states > 0, more.states) == (True, 0)


def test_hsdp_is_planned_for_the_shards_that_are_named() -> None:
    found = plans("gpus=8", "strategy=hsdp", "sharding.shards=2")
    assert found["hsdp", False].gradients == found["ddp", False].gradients / 2


def test_a_model_in_double_gets_its_samples_so() -> None:
    found = footprints(config("~model", f"+model._target_={__name__}.Double"))
    assert found.plans[0].gradients == 8 * found.num_parameters


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            f"~model +model._target_={__name__}.Decides",
            "numbers: DataDependentOutputException: [^:]*$",
        ),
        ("~model +model._target_=tests.worker.ratings.Rater", "^plan: .* sparse=False$"),
        ("model=transformers model.path=x model.lora.rank=2", "^model.lora.rank=2: "),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused(words: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        footprints(config(*words.split()))


def test_the_table_names_every_strategy(capsys: Capture) -> None:
    assert command.main(["gpus=2", "model.hidden=[16]"]) == 0
    shown = capsys.readouterr().out
    assert "strategy" in shown
    assert "fsdp" in shown
    assert f"{PARAMETERS:,} parameters" in shown


@pytest.mark.slow
def test_nothing_is_computed() -> None:
    """A model of 10^9 parameters is planned on this machine, with updates that are fused."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = footprints(
        config(*LM, "model.size=1b", "dataset.context=128", "gpus=8", "batch_size=8")
    )
    assert found.num_parameters > 9e8
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib * 1024 < found.num_parameters  # a parameter has four bytes


def test_the_history_of_lbfgs() -> None:
    """Two vectors for each of 4 updates, and two more."""
    plan = footprints(config("optimizer=lbfgs", "optimizer.history_size=4")).plans[0]
    assert plan.states == 10 * plan.gradients


@pytest.mark.usefixtures("own_handlers")
def test_a_plan_is_in_the_document(typed: Typed) -> None:
    plan = document(typed("plan", "model.hidden=[16]", "gpus=0", "--json"))["plan"]["plans"][0]
    parts = ("parameters", "gradients", "states", "activations")
    assert plan["total"] == sum(plan[key] for key in parts) > 0


@pytest.mark.usefixtures("own_handlers")
def test_gpus_that_are_no_numbers_are_refused_by_their_key(typed: Typed) -> None:
    done = typed("plan", "gpus=[a]")
    assert done.returncode == 2
    assert done.stderr.startswith("error: gpus")
