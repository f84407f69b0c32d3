"""The gate: what conf/ says, what `auto` becomes on a machine, and the line that each mistake
earns.
"""

import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from expt.config import conf_dir, constraints, groups, secrets
from expt.config import parse as parsing
from expt.config.identity import digest, hyperparameters, shown
from expt.config.parse import parse, settings_of
from expt.config.schema import TRACKERS, RunConfig
from expt.errors import ConfigError
from expt.machine import Machine
from tests.composing import composed
from tests.facade import Patch, as_typed, machine

FREE_OF_TORCH = (
    "config.parse", "config.schema", "config.rules", "errors", "runs.paths", "machine",
    "runs.result",
    "launch.forkserver", "command.help", "command.compose", "command.main", "command.sweep",
    "launch.local", "launch.pool", "data.kinds.originals",
)  # fmt: skip
GROUPS = ("model", "init", "dataset", "optimizer", "scheduler")
OPTIONS = [
    f"{group}={path.stem}"
    for group in GROUPS
    for path in sorted((conf_dir() / group).glob("*.yaml"))
]

CALLED = {"plain_sgd": "sgd", "warm_cosine": "cosine"}  # further settings of one kind

Parse = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def parsed() -> Parse:
    """`parsed("model=mlp", on=machine(2))`: what the command line would give on that machine."""

    def parse_overrides(*overrides: str, on: Machine | None = None, **replaced: Any) -> RunConfig:
        return parse({**composed(*overrides), **replaced}, on or machine())

    return parse_overrides


def test_settings_travel_without_their_secrets(parsed: Parse, monkeypatch: Patch) -> None:
    monkeypatch.setattr(secrets, "_texts", {})
    monkeypatch.setenv("EXPT_TEST_ROOT", "/elsewhere")
    sent = composed("dataset=mnist", "seed=7")
    sent["dataset"]["root"] = "${oc.env:EXPT_TEST_ROOT}"
    there = parse(settings_of(sent), machine(gpus=2))
    assert (there.seed, getattr(there.dataset, "root", None)) == (7, "/elsewhere")
    assert there.secrets == {"dataset.root": "${oc.env:EXPT_TEST_ROOT}"}
    assert there.gpu_indices == parsed("dataset=mnist", on=machine(gpus=2)).gpu_indices
    assert secrets.hidden("/elsewhere/x") == "${oc.env:EXPT_TEST_ROOT}/x", (
        "what is printed there shows none"
    )


TEXT = "dataset=text dataset.root=text.txt model=transformer task=language_model"
OF_TOKENS = TEXT.split()


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_that_is_shipped_parses(parsed: Parse, option: str) -> None:
    group, _, name = option.partition("=")
    asked = {
        "segmentation_folder": [
            *as_typed("dataset.root=photos dataset.num_classes=3 task=segmentation model=unet")
        ],
        "diabetes": ["task=regression"],
        "steps": ["~task", "+task._target_=own.Task"],
        "table": ["dataset.path=x", "dataset.targets=x"],
        "unet": [
            *as_typed("task=segmentation dataset=segmentation_folder dataset.root=photos"),
            *as_typed("dataset.num_classes=3"),
        ],
        "model=torchvision": ["model.arch=vgg11"],
        "timm": ["model.arch=vgg11"],
    }
    words = OF_TOKENS if option in OF_TOKENS else asked.get(option) or asked.get(name)
    if words is None:  # a text suits most keys without a default
        values = yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text(encoding="utf-8"))
        words = [f"{group}.{key}=x" for key, value in values.items() if value == "???"]
    assert getattr(parsed(option, *words), group).name == CALLED.get(name, name)


def test_the_groups_of_the_schema_are_those_of_conf() -> None:
    options = (option.partition("=") for option in OPTIONS)
    named = {(group, CALLED.get(name, name)) for group, _, name in options}
    assert named == {
        (group, name) for group in GROUPS for name in groups.GROUPS[group] if name != "_target_"
    }


MISTAKES: dict[str, tuple[int | str, ...]] = {
    "unknown key": (0, "+modle=mlp", "modle=mlp: there is no such key. Did you mean 'model'?"),
    "a key that is called as a type": (0, "+int=3", "int=3: there is no such key."),
    "unknown key of a group": (0, "+optimizer.lrr=1",
        "optimizer.lrr=1: there is no such key. Did you mean 'lr'?"),
    "unknown name in a group": (0, "model.name=mlpp",
        "model.name=mlpp: not one of mlp, convnet, paddle_convnet, resnet18, torchvision, "
        "timm, transformer, unet, transformers. Did you mean 'mlp'?"),
    "text for an integer": (0, "batch_size=abc", "batch_size=abc: input should be a valid integer"),
    "a number for a list": (0, "model.hidden=256",
        "model.hidden=256: input should be a list, e.g. model.hidden=["),
    "a list of metrics": (0, "task={_target_:mine.Own,metrics:[near]}",
        "task.metrics=[near]: input should be a mapping, e.g. "),
    "classes where there are none": (0,
        "task=regression dataset={_target_:mine.Rows,num_classes:3}", "dataset.num_classes=3: "),
    "a value for a group that is null": (0, "early_stop=2",
        "early_stop=2: has keys of its own, e.g. 'early_stop={metric: loss/val, patience: 5}'"),
    "a value for a group": (0, "ddp=true",
        "ddp=true: has keys of its own, e.g. ddp.find_unused_parameters=..."),
    "a value for callbacks": (0, "callbacks=5",
        "callbacks=5: input should be a list, e.g. 'callbacks=[{_target_: mine.Watch}]'"),
    "a callback without a class": (0, "callbacks=[{_target_:mine.Watch},{every:2}]",
        "callbacks.1._target_: ", "callbacks.1.every=2: "),
    "a value for a list of groups": (0, "optimizer.groups=head",
        "optimizer.groups=head: input should be a list, e.g. 'optimizer.groups=[{match: ...}]'"),
    "unknown key of a group in a list": (0, "optimizer.groups=[{match:head},{mach:head}]",
        "optimizer.groups.1.match: has no value",
        "optimizer.groups.1.mach=head: there is no such key. Did you mean 'match'?"),
    "no regular expression": (0, "optimizer.groups=[{match:'*.bias'}]",
        "optimizer.groups.0.match=*.bias: is not a regular expression: "),
    "below its range": (0, "optimizer.lr=-1", "optimizer.lr=-1: input should be greater than 0"),
    "not a number": (0, "gradient_clip=nan", "gradient_clip=nan: input should be a finite number"),
    "a choice": (0, "backend=glo", "backend=glo: input should be 'nccl' or 'gloo'"),
    "one of several types": (0, "amp=fp8",
        "amp=fp8: input should be true or false or 'bf16' or 'fp16'"),
    "a key taken away": (0, "~model.hidden",
        "model.hidden: has no value; give one, e.g. model.hidden=..."),
    "several at once": (0, "epochs=0 seed=-1 +foo=1",
        "epochs=0: input should be greater than or equal to 1",
        "seed=-1: input should be greater than or equal to 0", "foo=1: there is no such key."),
    "4 GPUs of none": (0, "gpus=4", "gpus=4: "),
    "fewer workers than GPUs": (8, "gpus=4 world_size=2", "gpus=4: "),
    "batch that does not divide": (0, "world_size=3", "batch_size=64: "),
    "batch smaller than the workers": (0, "batch_size=1", "batch_size=1: "),
    "several impossible at once": (0, "gpus=4 amp=bf16 objective=f1/val batch_size=6", "gpus=4: ",
        "batch_size=6: ", "objective=f1/val: "),
    "a size that is none": (0, f"{TEXT} model.size=5m",
        "model.size=5m: input should be '400k', '1m', "),
    "a list of sizes": (0, f"{TEXT} model.size=[1m]",
        "model.size=[1m]: input should be '400k', '1m', "),
    "a tracker that is none": (0, "send=mlflo", f"send=[mlflo]: input should be '{TRACKERS[0]}', "),
    "a mode that is none": (0, "wandb.mode=onlin",
        "wandb.mode=onlin: input should be 'online' or 'offline'"),
    "a name that is not dotted": (0, "model={_target_:own}", "model.target=own: "),
    "a dataset of one's own without its classes": (0, "dataset={_target_:mine.Own}",
        "dataset.num_classes: task=classification needs it"),
    "tokens of pictures": (0, "model=transformer task=language_model",
        "task=language_model: dataset=digits is for task=classification, or for a custom task"),
    "a negative number of GPUs": (2, "gpus=-1",
        "gpus=-1: input should be greater than or equal to 0 or a list, e.g. gpus=[1,2]"),
    **{
        f"text: {words}": (0, f"{TEXT} {words}", words.split()[-1])
        for words in (
            *as_typed("model=mlp model=convnet task=classification task=regression"),
            *as_typed("model.width=30 model.width=2 dataset.tokens=words"),
            "dataset.test_fraction=0.5 dataset.val_fraction=0.5",
            "dataset.test_fraction=0 eval_split=test",
            "dataset.test_fraction=0 objective=loss/test",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_earns_its_line(parsed: Parse, name: str) -> None:
    gpus, words, *problems = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        parsed(*str(words).split(), on=machine(int(gpus)))
    found = zip(caught.value.problems, map(str, problems), strict=True)
    assert [line[: len(begins)] for line, begins in found] == problems


LISTS = {
    "sharding.wrap=autos": ("strategy=fsdp",),
    "activation_checkpointing=true": (),
    "optimizer.betas=1": ("optimizer=adam",),
    "model.paddings=x": ("model=convnet",),
    "freeze=conv": (),
}


def test_an_example_of_a_list_is_one(parsed: Parse) -> None:
    for wrong, words in LISTS.items():
        with pytest.raises(ConfigError) as caught:
            parsed(*words, wrong)
        (example,) = shlex.split(str(caught.value).rpartition("e.g. ")[2])
        assert example.startswith(wrong.partition("=")[0])
        parsed(*words, example)


def test_several_problems_make_one_message(parsed: Parse) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed("epochs=0", "seed=-1")
    first, *rest = str(caught.value).splitlines()
    assert (first, len(rest)) == ("2 problems in the configuration", 2)


def test_a_processor_with_fp16_may_use_it(parsed: Parse) -> None:
    assert parsed("amp=fp16", on=machine(cpu_fp16=True)).amp == "fp16"


@pytest.mark.parametrize("group", ["model", "optimizer", "scheduler"])
def test_a_class_of_ones_own(parsed: Parse, group: str) -> None:
    own = getattr(
        parsed(**{group: {"_target_": "mine.Own", "lr": 3, "sizes": [1, 2], "name": "mine"}}), group
    )
    assert isinstance(own, constraints.Target)
    assert own.name == "_target_"
    assert own.target == "mine.Own"
    assert own.kwargs == {"lr": 3, "sizes": [1, 2], "name": "mine"}


@pytest.mark.parametrize(
    ("node", "kwargs"),
    [
        ({"_target_": "mine.Own", "name": "mlp"}, {"name": "mlp"}),
        ({"name": "mlp", "hidden": [1], "_target_": "mine.Own"}, {"hidden": [1]}),
        ({"name": "deep", "_target_": "mine.Own"}, {"name": "deep"}),
        ({"name": ["mlp"], "_target_": "mine.Own"}, {"name": ["mlp"]}),
        ({"_target_": "mine.Own", "name": {"a": 1}}, {"name": {"a": 1}}),
    ],
)
def test_a_name_is_an_argument_but_for_that_of_a_choice_which_the_class_is_laid_over(
    node: dict[str, Any], kwargs: dict[str, Any], parsed: Parse
) -> None:
    assert parsed(model=node).model.kwargs == kwargs


def test_a_dataset_of_ones_own(parsed: Parse) -> None:
    node = {
        "_target_": "mine.Own", "num_classes": 3, "root": "x", "train": {"split": "a"},
        "mean": [0.5], "std": [1.0],
    }  # fmt: skip
    dataset = parsed(dataset=node).dataset
    assert (dataset.target, dataset.num_classes, dataset.kwargs) == ("mine.Own", 3, {"root": "x"})
    assert (dataset.train, dataset.test, dataset.mean) == ({"split": "a"}, {"train": False}, (0.5,))
    assert (dataset.val_fraction, dataset.train_limit, dataset.num_workers) == (0.1, None, "auto")


def test_what_each_task_is_chosen_by(parsed: Parse) -> None:
    own = "task={_target_: mine.Own, metrics: {mae: min}}"
    assert parsed(own).objective == "mae/val"
    assert parsed(*OF_TOKENS).objective == "loss/val"
    asked = ("eval_split=test", "objective=perplexity/test")
    assert parsed(*OF_TOKENS, *asked).objective == "perplexity/test"


@pytest.mark.parametrize(
    ("words", "is_so"),
    [
        ("", (4, 4, 128)),
        ("model.size=124m", (12, 12, 768)),
        ("model.size=124m model.layers=3", (3, 12, 768)),
        ("model.width=64", (4, 4, 64)),
    ],
)
def test_a_size_of_a_transformer_says_what_is_not_given(
    words: str, is_so: tuple[int, int, int], parsed: Parse
) -> None:
    model = parsed(*OF_TOKENS, *words.split()).model
    assert (model.layers, model.heads, model.width) == is_so


def test_a_size_is_a_name_for_what_counts(parsed: Parse) -> None:
    sizes = "model.size=1m", "model.layers=5 model.width=128", ""
    named, given, other = (digest(parsed(*OF_TOKENS, *each.split()), {}) for each in sizes)
    assert named == given != other


def test_one_tracker_is_a_list_of_one(parsed: Parse) -> None:
    assert parsed("send=mlflow").send == parsed("send=[mlflow]").send == ("mlflow",)
    assert parsed("send=null").send == ()


def test_a_password_of_the_environment_is_used_and_not_written(
    parsed: Parse, monkeypatch: Patch
) -> None:
    with pytest.raises(ConfigError, match=r"=https://host/: a password would") as raised:
        parsed("mlflow.tracking_uri='https://me:word@host/'")
    assert "word" not in str(raised.value).replace("password", "")
    monkeypatch.setenv("OUR_MLFLOW", "https://me:word@host")
    config = parsed("mlflow.tracking_uri=${oc.env:OUR_MLFLOW}", "mlflow.tags={team: vision}")
    assert config.trackers["mlflow"].tracking_uri == "https://me:word@host"
    assert shown(config)["mlflow"]["tracking_uri"] == "${oc.env:OUR_MLFLOW}"
    assert not [x for x in hyperparameters(shown(config)) if x.startswith(("send", *TRACKERS))]


def test_a_mistake_is_told_without_torch() -> None:
    modules = ", ".join(f"expt.{name}" for name in FREE_OF_TORCH)
    program = f"import sys, {modules}; assert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_what_checks_a_configuration_is_made_once(monkeypatch: Patch) -> None:
    """It takes 45 ms, and a sweep checks each of its points."""
    settings, machine = composed(), Machine(cpus=2)
    parse(settings, machine)
    monkeypatch.setattr("expt.config.parse.TypeAdapter", None)
    assert parse(settings, machine) == parse(settings, machine)


def test_a_record_is_read_as_yaml_writes_it() -> None:
    more = {"target": "a.F", "kwargs": {"n": 1}, "name": "y"}  # as a record has a class, but own
    own = f"{{_target_: a.B, name: x, width: 3, more: {constraints.typed(more)}}}"
    words = (
        f"model={own}",
        "+dataset.x=1",
        "dataset={_target_: a.C, num_classes: 2, train: {size: 3}}",
        "+task.metrics.auroc={_target_: a.D, better: max, num: 2}",
        "callbacks=[{_target_: a.E, n: 1}]",
    )
    config = parse(composed(*words), Machine(gpus=(), cpus=2))
    again = parsing.as_typed(shown(config))
    assert again["model"] == {"_target_": "a.B", "name": "x", "width": 3, "more": more}
    assert parse(settings_of(again), Machine(gpus=(), cpus=2)) == config
