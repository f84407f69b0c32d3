"""Activations computed anew: the same numbers, and less memory."""

import copy
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from expt.errors import ConfigError
from expt.models.transformer import Transformer
from expt.models.vision import MLP, ResNet18
from expt.training.compiling import checkpoint_activations, compile_module

Wanted = Sequence[str] | Literal["auto"]
KEY = "activation_checkpointing"


def decoder() -> nn.Module:
    return Transformer(
        vocab_size=50, context=16, layers=3, heads=2, width=32, dropout=0.2, positions="rotary"
    )


def resnet() -> nn.Module:
    return ResNet18(channels=1, image_size=(8, 8), num_classes=3)


TOKENS, IMAGES = (
    torch.arange(64).view(4, 16) % 50,
    torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)),
)


def trained(
    build: Callable[[], nn.Module], inputs: Tensor, wanted: Wanted
) -> tuple[list[float], dict[str, Tensor], int]:
    """Return losses and state of three steps, and the size of the last saved activations."""
    torch.manual_seed(0)
    model = build()
    if wanted:
        checkpoint_activations(model, wanted, compiled=False)
    optimizer, losses, kept = torch.optim.SGD(model.parameters(), lr=0.1), [], 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    for _ in range(3):
        kept = 0
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict(), kept


@pytest.mark.parametrize(("build", "inputs"), [(decoder, TOKENS), (resnet, IMAGES)])
def test_numbers_stay_and_less_is_kept(build: Callable[[], nn.Module], inputs: Tensor) -> None:
    """Dropout in the one, batch norms' statistics in the other."""
    losses, state, much = trained(build, inputs, [])
    again, state_again, little = trained(build, inputs, "auto")
    assert again == losses
    assert list(state_again) == list(state)
    assert all(torch.equal(state_again[name], value) for name, value in state.items())
    assert little < much / 3


def test_what_is_named_is_checkpointed_once() -> None:
    model = decoder()
    assert checkpoint_activations(model, [r"blocks\.[02]", r"blocks\.0\.attention", "norm"],
        compiled=False) == [
        "blocks.0", "blocks.2", "norm",
    ]  # fmt: skip
    changed = [name for name, part in model.named_modules() if "forward" in vars(part)]
    assert changed == ["blocks.0", "blocks.2", "norm"]


def test_a_copy_is_its_own() -> None:
    model = decoder()
    checkpoint_activations(model, "auto", compiled=False)
    copied = copy.deepcopy(model)
    copied(TOKENS).mean().backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("build", "wanted", "compiled", "says"), [
    (decoder, ["blocks"], False, "=[blocks]: matches the whole name of no module"),
    (decoder, ["norn"], False,
        "=[norn]: matches the whole name of no module (containers don't count). Did you"),
    (decoder, ["x+"], False,
        "=[x+]: matches the whole name of no module (containers don't count). There are 31, "),
    (resnet, "auto", True,
        ": 'layer1.0' has buffers, such as a batch norm's statistics, which compiled"),
    (lambda: MLP(hidden=(4,), dropout=0.0, channels=1, image_size=(8, 8), num_classes=3), "auto",
        False,
     f"=auto: MLP has no blocks that are alike; name modules, e.g. {KEY}=["),
])  # fmt: skip
def test_what_cannot_be_is_told(
    build: Callable[[], nn.Module], wanted: Wanted, compiled: bool, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        checkpoint_activations(build(), wanted, compiled=compiled)
    assert str(refused.value).startswith(KEY + says)


def compiled(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if part._compiled_call_impl is not None]


def test_a_model_or_its_blocks() -> None:
    whole, blocks = (
        Transformer(vocab_size=7, context=6, layers=2, width=8, heads=2) for _ in range(2)
    )
    compile_module(whole, True)
    compile_module(blocks, "blocks")
    assert (compiled(whole), compiled(blocks)) == ([""], ["blocks.0", "blocks.1"])


def test_a_model_without_blocks_is_told() -> None:
    with pytest.raises(
        ConfigError, match="compile=blocks: MLP has no blocks that are alike; use compile=true"
    ):
        compile_module(
            MLP(hidden=(4,), dropout=0.0, channels=1, image_size=(8, 8), num_classes=3), "blocks"
        )
