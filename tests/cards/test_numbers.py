"""Losses and metrics on soft GPUs are those of the CPU: each experiment, each task, each strategy.

New memory is NaN there, and what a copy brings arrives as late as it may.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from expt.command.rerun import NOT_REPEATED
from tests.cards.plain import BATCH, CLIP, LR, MOMENTUM, SEED, STEPS
from tests.conftest import Cards, Trained
from tests.facade import NO_PICTURES, RunFolder, as_typed, python
from tests.integration.test_resume import assert_equal, kill_at

WITHIN = 1e-5
FEW = (
    *as_typed("epochs=1 log_every=1 threads=1 timeout_s=90 drop_last=false backend=auto"),
    NO_PICTURES,
)
STRATEGIES = {
    "one": ("gpus=1",),
    "ddp, 2 cards": ("gpus=2",),
    "ddp, 4 cards": ("gpus=4",),
    "fsdp, 2 cards": ("gpus=2", "strategy=fsdp"),
    "fsdp, 4 cards": ("gpus=4", "strategy=fsdp"),
    "hsdp, 4 cards": ("gpus=4", "strategy=hsdp", "sharding.shards=2"),
    "dp, 2 cards": ("gpus=2", "strategy=dp"),
    "dp, 4 cards": ("gpus=4", "strategy=dp"),
}


def experiment(name: str, words: str) -> tuple[str, ...]:
    return (f"experiment={name}", *as_typed(words))


def task(name: str, rows: str, words: str) -> tuple[str, ...]:
    """The words of one of tests/every_task's cases."""
    own = f"_target_: tests.every_task.{rows}, num_workers: 0, val_fraction: 0.06"
    chosen = f"batch_size=12 seed=4 optimizer=plain_sgd optimizer.lr=0.1 {words}"
    own += ", num_classes: 4" if rows == "Images" else ""
    return (f"task={name}", "~dataset", f"+dataset={{{own}}}", *as_typed(chosen))


CASES = {
    "ddp_mlp": experiment("ddp_mlp", "batch_size=64 dataset.root=MNIST"),
    # No dropout: a card draws other random numbers
    "keras_convnet": experiment(
        "keras_convnet", "batch_size=64 dataset.root=MNIST model.dropout=0"
    ),
    "d2l_resnet18": experiment(
        "d2l_resnet18", "batch_size=8 dataset.root=FASHION_MNIST max_steps=2"
    ),
    "paddle_mnist": experiment("paddle_mnist", "batch_size=60 dataset.root=MNIST"),
    "char_lm": experiment(
        "char_lm", "dataset.root=TEXT max_steps=5 model.size=null model.layers=2 model.width=32"
    ),
    "gan": experiment("gan", "max_steps=5"),
    "classification": task("classification", "Images", "model.hidden=[5]"),
    "multilabel": task("multilabel", "Labels", "task.threshold=0.4 model.hidden=[5]"),
    "regression": task("regression", "Numbers", "task.loss=huber model.hidden=[5]"),
    "segmentation": task(
        "segmentation",
        "Masks",
        "task.num_classes=3 model=unet model.widths=[3,4] model.batch_norm=false",
    ),
    "language_model": task(
        "language_model", "Lines", "model=transformer model.layers=1 model.heads=2 model.width=8"
    ),
    "own": (
        *task("classification", "Weighted", "objective=mae/val")[1:],
        *("~task", "+task={_target_: tests.every_task.ByWeight, metrics: {mae: min}}"),
        *("~model", "+model={_target_: tests.every_task.Linear}"),
    ),
}
FAST = {
    ("paddle_mnist", "ddp, 2 cards"),
    ("classification", "dp, 4 cards"),
}
PAIRED = ("paddle_mnist", "gan", "segmentation", "own")
"""Cases for two cards too: a convnet, several updates, ignored pixels, weights of samples."""
NOISE = 1e-3
"""How far an evaluation of `keras_convnet` may be off where gradients are added in another order.

A bias before its last batch norm has gradients of rounding errors alone, which Adam makes as large
as any: no loss of training depends on it, but the norm's averages follow it with a delay.
"""


def tried(name: str, strategy: str) -> object:
    marks = () if (name, strategy) in FAST else pytest.mark.slow
    return pytest.param(name, strategy, id=f"{name}: {strategy}", marks=marks)


Values = dict[tuple[str, int], float]


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, int], Values]:
    """The values of runs on the CPU, by case and number of workers."""
    return {}


def values(run: RunFolder) -> Values:
    """All losses and metrics of a run, by tag and step; those of the end are of step 0."""
    last = {(tag, 0): value for tag, value in run.result["metrics"].items()}
    of_machine = (*NOT_REPEATED, "lr", "epoch")
    return {
        at: value
        for at, value in {**run.values, **last}.items()
        if value is not None and not at[0].startswith(of_machine)
    }


def raced(run: RunFolder) -> list[str]:
    """What the cards say of bytes that were overwritten while they were copied."""
    logs = (run.folder / "logs").rglob("stderr.log")
    return [line for log in logs for line in log.read_text().splitlines() if "pinned bytes" in line]


def with_data(words: Sequence[str], folder: Path, request: pytest.FixtureRequest) -> list[str]:
    """Put paths in the place of MNIST, FASHION_MNIST and TEXT."""
    roots = {"TEXT": folder / "text.txt"}
    roots["TEXT"].write_text("to be or not to be, that is the question\n" * 300)
    if any("MNIST" in word for word in words):
        few = request.getfixturevalue("few_images")
        roots |= {name.upper(): root for name, root in few.items()}
    split = [word.partition("=") for word in words]
    return [f"{key}{equals}{roots.get(value, value)}" for key, equals, value in split]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        tried(*each)
        for each in itertools.product(CASES, STRATEGIES)
        if (each[0] != "gan" or each[1].startswith(("one", "ddp")))  # it goes with ddp alone
        and ("2 cards" not in each[1] or each[0] in PAIRED)
    ],
)
def test_losses_on_cards_are_those_of_the_cpu(
    name: str,
    strategy: str,
    cards: Cards,
    trained: Trained,
    known: dict[tuple[str, int], Values],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    words = (*FEW, *with_data(CASES[name], tmp_path, request))
    how = STRATEGIES[strategy]
    is_dp, num_cards = "strategy=dp" in how, int(how[0][-1])
    cards(poison=True, late=True)
    if (name, num_cards) not in known:
        reference = trained(*words, "gpus=0", f"world_size={num_cards}", name="cpu")
        known[name, num_cards] = values(reference)
    expected = known[name, num_cards]
    run = trained(*words, *how, f"world_size={1 if is_dp else num_cards}", name="cards")
    found = values(run)
    assert run.result["devices"] == [str(card) for card in range(num_cards)]
    assert not raced(run)
    assert found.keys() == expected.keys()
    off = {at: abs(found[at] - value) / max(1, abs(value)) for at, value in expected.items()}
    worst = max(off, key=lambda at: off[at])
    print(f"off by {off[worst]:.1e} in {worst[0]}, of {len(off)} values")  # pytest -rP shows it
    summed_otherwise = name == "keras_convnet" and any("strategy" in word for word in how)
    for at, difference in off.items():
        within = NOISE if summed_otherwise and at[0].endswith("/test") else WITHIN
        assert difference < within, (at, found[at], expected[at])


BY_HAND = """
import json, sys
from tests.cards import plain
print(json.dumps(plain.losses(*sys.argv[1:])))
"""
BY_PLAIN_LOOP = as_typed(
    f"gpus=1 batch_size={BATCH} max_steps={STEPS} seed={SEED} optimizer.lr={LR} model.dropout=0 "
    f"optimizer.momentum={MOMENTUM} gradient_clip={CLIP} log_every=1 threads=1"
)


@pytest.mark.slow
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_losses_are_those_of_a_loop_by_hand(
    model: str, amp: str, cards: Cards, trained: Trained, tmp_path: Path
) -> None:
    cards()
    done = python(BY_HAND, model, amp, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *expected, of_validation = json.loads(done.stdout)
    words = (*BY_PLAIN_LOOP, NO_PICTURES, f"model={model}")
    run, exact = trained(*words, f"amp={amp}"), trained(*words, name="exact")
    found, others = ([loss for _, loss in each.curve("running/loss")] for each in (run, exact))
    off = max(abs(mine - other) for mine, other in zip(found, expected, strict=True))
    print(f"off by {off:.1e} in running/loss, of {len(found)} values")
    assert off < WITHIN
    step, loss = run.curve("loss/val")[-1]
    assert step == STEPS
    assert loss == pytest.approx(of_validation, abs=WITHIN)
    assert found != pytest.approx(others, abs=10 * WITHIN), "it was in full precision"


DRAWING = as_typed(
    "model=convnet model.dropout=0.3 optimizer=adam epochs=3 dataset.train_limit=480 log_every=1 "
    "checkpoint.every_steps=3 threads=1"
)
RESUMED = {
    "fp16, one card": "gpus=1 amp=fp16",
    "fp16, ddp": "gpus=2 amp=fp16",
    "fp16, fsdp": "gpus=2 amp=fp16 strategy=fsdp",
    "fsdp, sharded checkpoints": "gpus=2 strategy=fsdp checkpoint.sharded=true",
    "bf16, hsdp": "gpus=4 amp=bf16 strategy=hsdp sharding.shards=2",
    "dp": "gpus=2 strategy=dp",
    "average, states on the host": "gpus=2 ema=0.9 offload=cpu",
}
FAST_RESUMED = ("fp16, ddp",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST_RESUMED else pytest.mark.slow)
        for name in RESUMED
    ],
)
def test_killed_run_is_exact(name: str, cards: Cards, trained: Trained, tmp_path: Path) -> None:
    words = (*DRAWING, NO_PICTURES, *as_typed(RESUMED[name]))
    cards(poison=True, late=True)
    kill_at(tmp_path / "killed", words, step=9)
    resumed = trained("resume=auto", name="killed")
    whole = trained(*words, name="whole")
    assert resumed.result["attempts"] == 2
    assert resumed.result["resumed_from"]["step"] > 0
    assert_equal(resumed, whole)
    assert not raced(whole)
    assert not raced(resumed)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_new_memory_late_copies_are_harmless(name: str, cards: Cards, trained: Trained) -> None:
    words = (*DRAWING, *as_typed(RESUMED[name]), "tensorboard.images=true", "epochs=2")
    cards()
    plain = trained(*words, name="plain")
    cards(poison=True, late=True)
    staged = trained(*words, name="staged")
    assert not raced(staged)
    assert_equal(plain, staged)
