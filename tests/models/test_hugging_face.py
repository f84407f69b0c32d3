"""Models of transformers: by task, with adapters, in a run's identity, kept and exported."""

import dataclasses
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expt.config import groups
from expt.config.auto import fill_auto
from expt.data import tokenizer
from expt.data.fingerprint import identity_of, published
from expt.errors import ConfigError
from expt.features import Anything, Classes, Features, Labels, Numbers, Text, Tokens
from expt.machine import Machine
from expt.models import published_files
from expt.models.build import build
from expt.training.parameter_groups import depths
from expt.worker import parallel
from tests.conftest import Configured
from tests.facade import Patch, python
from tests.worker.conftest import ALONE

DEFAULT = groups.DefaultInit(name="default")
TEXT = Text(tokenizer="x", digest="x", vocab_size=64, pad_id=0)
INPUTS = {
    "input_ids": torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(0)),
    "attention_mask": torch.ones(3, 9, dtype=torch.long),
}
SHAPE = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = {**SHAPE, "intermediate_size": 32, "max_position_embeddings": 32}
CLASSES = Classes(names=("bad", "fair", "good"))
TARGETS = {
    "classes": (CLASSES, (3, 3), "single_label_classification"),
    "labels": (Labels(names=("a", "b")), (3, 2), "multi_label_classification"),
    "number": (Numbers(names=("price",), shape=(1,)), (3, 1), "regression"),
}


def save(folder: Path, kind: str, *, seed: int = 0, **more: Any) -> Path:
    """Write a tiny model of a class of transformers, with random weights."""
    transformers = library()
    cls = getattr(transformers, kind)
    torch.manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        cls(cls.config_class(**{**SIZES, **more})).save_pretrained(folder)
    return folder


def library() -> Any:
    pytest.importorskip("peft")
    found = pytest.importorskip("transformers")
    found.utils.logging.disable_progress_bar()
    return found


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("bert"), "BertForMaskedLM")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return save(folder, "LlamaForCausalLM", tie_word_embeddings=True, eos_token_id=2)


def model_of(path: Path | str, targets: Any = CLASSES, *, fetch: bool = True, **keys: Any) -> Any:
    lora = groups.Lora(**keys.pop("lora", {}))
    config = groups.HuggingFaceModel(name="transformers", path=str(path), lora=lora, **keys)
    torch.manual_seed(0)
    return build(config, DEFAULT, Features(TEXT, targets), INPUTS, fetch=fetch)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("base", ["bert", "llama"])
def test_a_head_is_drawn_for_the_targets(
    base: str, name: str, request: pytest.FixtureRequest
) -> None:
    targets, shape, problem = TARGETS[name]
    module = model_of(request.getfixturevalue(base), targets)
    outputs = module(INPUTS)
    assert isinstance(outputs, Tensor)
    assert (outputs.shape, module.training) == (shape, True)
    own = module.model.config
    assert (own.problem_type, own.pad_token_id) == (problem, 0)
    assert tuple(own.id2label.values()) == targets.names
    head = "score.weight" if base == "llama" else "classifier.weight"
    assert head in module.drawn
    again = model_of(request.getfixturevalue(base), targets)
    pairs = zip(module.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "by the seed"
    assert {one.dtype for one in module.parameters()} == {torch.float32}


def test_all_that_fits_is_loaded_and_a_head_of_other_classes_is_not(tmp_path: Path) -> None:
    library()
    folder = save(tmp_path, "BertForSequenceClassification", seed=1, num_labels=3)
    there = library().BertForSequenceClassification.from_pretrained(folder).state_dict()
    same = model_of(folder)
    assert not same.drawn
    assert all(torch.equal(there[x], one) for x, one in same.model.state_dict().items())
    other = model_of(folder, TARGETS["labels"][0])
    assert other.drawn == ["classifier.bias", "classifier.weight"]
    new = model_of(folder, pretrained=False)
    assert not torch.equal(new.model.classifier.weight, there["classifier.weight"])


@pytest.mark.parametrize("last", ["good", "best"])
def test_a_head_with_other_places_for_the_classes_is_noted(last: str, tmp_path: Path) -> None:
    library()
    names = {0: "fair", 1: "bad", 2: last}
    folder = save(tmp_path, "BertForSequenceClassification", id2label=names)
    notes = model_of(folder).notes
    assert [note.endswith("fair, bad, good") for note in notes] == [True] * (last == "good")
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = dict(reversed(config["id2label"].items()))  # as texts are ordered
    (folder / "config.json").write_text(json.dumps(config))
    assert model_of(folder).notes == notes


def test_a_causal_model_gives_logits_of_tokens(llama: Path, bert: Path) -> None:
    tokens = Tokens(vocab_size=64, context=9)
    module = model_of(llama, tokens)
    assert module(INPUTS).shape == (3, 9, 64)
    assert torch.equal(module(INPUTS), module(INPUTS["input_ids"])), "as of dataset=text"
    assert not module.drawn
    assert module.model.lm_head.weight is module.model.model.embed_tokens.weight
    with pytest.raises(ConfigError, match=r"^model.path=.*: predicts a token from those after it"):
        model_of(bert, tokens)
    model_of(bert, tokens, config={"is_decoder": True})


def test_a_custom_task_gets_the_outputs_of_the_folders_own_architecture(bert: Path) -> None:
    assert model_of(bert, Anything())(INPUTS).shape == (3, 9, 64)
    assert type(model_of(bert, Anything()).model).__name__ == "BertForMaskedLM"


@pytest.mark.parametrize(
    ("kind", "targets", "more", "noted"),
    [
        ("MixtralForCausalLM", Tokens, {"output_router_logits": True}, "its own loss is other"),
        ("MixtralForCausalLM", Tokens, {}, None),
        ("FNetForMaskedLM", Classes, {}, "its outputs depend on a batch's padding"),
        ("ConvBertForMaskedLM", Classes, {}, "its outputs depend on a batch's padding"),
        ("ElectraForMaskedLM", Classes, {}, None),
    ],
)
def test_other_losses_and_outputs_by_padding_are_noted(
    kind: str, targets: type, more: dict[str, Any], noted: str | None, tmp_path: Path
) -> None:
    library()
    sizes = {"num_local_experts": 2, "num_key_value_heads": 2} if "Mixtral" in kind else {}
    known = {Tokens: Tokens(vocab_size=64, context=9), Classes: CLASSES}[targets]
    module = model_of(save(tmp_path, kind, **sizes, **more), known)
    assert len(module.notes) == bool(noted)
    assert all(note.startswith(str(noted)) for note in module.notes)
    assert module.training


LORA: Mapping[str, Any] = {"rank": 2, "alpha": 4}


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("BertForSequenceClassification", {"classifier"}),
        ("BertForQuestionAnswering", {"qa_outputs"}),
        ("BertForMaskedLM", set()),
        ("T5EncoderModel", set()),
    ],
)
def test_a_custom_task_trains_adapters_and_the_head_of_any_class(
    kind: str, layers: set[str], tmp_path: Path
) -> None:
    library()
    module = model_of(save(tmp_path, kind), Anything(), lora=LORA)
    trained = {name for name, one in module.named_parameters() if one.requires_grad}
    heads = [name.split(".model.", 1)[1] for name in trained if "lora_" not in name]
    assert {name.partition(".")[0] for name in heads} == layers
    assert len(trained) > len(heads)


@pytest.mark.parametrize("base", ["bert", "llama"])
def test_adapters_are_of_the_layer_they_are_in(base: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(base)
    plain = depths(model_of(folder))
    found = depths(model_of(folder, lora=LORA))
    kept = ("original_module.", "base_layer.", "base_model.model.", "modules_to_save.default.")
    checked = 0
    for name, depth in found.items():
        own = name.partition(".lora_")[0] + ".weight" if ".lora_" in name else name
        for part in kept:
            own = own.replace(part, "")
        assert plain[own] == depth
        checked += ".lora_" in name
    assert checked
    assert max(plain.values()) > 2


@pytest.mark.parametrize("base", ["bert", "llama"])
def test_a_checkpoint_holds_adapters_and_head(base: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(base)
    module = model_of(folder, lora=LORA)
    trained = {name for name, one in module.named_parameters() if one.requires_grad}
    saved = module.state_dict()
    assert trained == {*saved}
    heads = [name for name in trained if "lora_" not in name]
    assert all(".modules_to_save." in name for name in heads)
    layers = {"bert": {"classifier", "bert.pooler.dense"}, "llama": {"score"}}[base]
    assert {name.split(".model.", 1)[1].split(".modules_to_save")[0] for name in heads} == layers
    with torch.no_grad():
        for one in module.parameters():
            if one.requires_grad:
                one.normal_()
    torch.manual_seed(1)
    other = model_of(folder, lora=LORA)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.eval()(INPUTS), module.eval()(INPUTS))
    average = torch.optim.swa_utils.AveragedModel(module)
    assert {f"module.{name}" for name in saved} == {*average.state_dict()} - {"n_averaged"}
    average.load_state_dict(average.state_dict())


def test_a_name_that_cannot_be_fetched_is_refused_before_transformers_is_imported(
    tmp_path: Path,
) -> None:
    words = 'sys.argv = ["expt", "model=transformers", "model.path=no/such"]'
    program = f"import sys\nfrom expt.command import main\n{words}\nmain.main(sys.argv[1:])"
    done = python(program, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert (
        "error: model.path=no/such: there is no such folder; nor can it be fetched" in done.stderr
    )


def test_what_cannot_be_built_is_refused_by_what_it_is(
    bert: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused: dict[str, Any] = {
        r"^model.lora.targets=quary: ": {"lora": {"rank": 2, "targets": ("quary",)}},
        r"^model.config.hidden: bert has no such entry. Did you mean ": {"config": {"hidden": 1}},
        r"^model.path=.*: knows 32 tokens, and the tokenizer has 64; ": {
            "config": {"vocab_size": 32}
        },
    }
    for match, keys in refused.items():
        with pytest.raises(ConfigError, match=match):
            model_of(bert, **keys)
    with pytest.raises(ConfigError, match=r"^model.path=\S*: has no config.json; "):
        model_of(tmp_path)
    with pytest.raises(
        ConfigError, match=r"^model.path=no/such: there is no such folder; nor can "
    ):
        model_of("no/such")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none"}))
    with pytest.raises(ConfigError, match=r"^model.path=\S*: holds no weights"):
        model_of(tmp_path)
    with pytest.raises(ConfigError, match=r"^model.path=\S*: its model_type is none, "):
        model_of(tmp_path, pretrained=False)
    images = Features(Anything(), CLASSES)
    config = groups.HuggingFaceModel(name="transformers", path=str(bert))
    with pytest.raises(ConfigError, match=r"^model=transformers: takes texts, "):
        build(config, DEFAULT, images, torch.rand(1, 3, 8, 8))


@pytest.mark.parametrize(("kind", "takes"), [("Roberta", 30), ("Bart", 32), ("GPT2", 32)])
def test_the_longest_text_is_tried(tmp_path: Path, kind: str, takes: int) -> None:
    ends = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0}
    kinds = {"Bart": "BartForConditionalGeneration", "GPT2": "GPT2LMHeadModel"}
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "n_head": 2}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2} if kind == "Bart" else {}
    library()
    folder = save(tmp_path, kinds.get(kind, f"{kind}ForMaskedLM"), **ends, **sizes)
    config = groups.HuggingFaceModel(name="transformers", path=str(folder))
    features = Features(dataclasses.replace(TEXT, pad_id=1), CLASSES)
    for size in (takes, takes + 1, takes + 20):
        ids = torch.full((1, size), 5)
        ids[:, -1] = 2
        example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if size == takes:
            build(config, DEFAULT, features, example)
            continue
        with pytest.raises(ConfigError, match=rf"the longest text of {size} tokens; use "):
            build(config, DEFAULT, features, example)


@pytest.mark.parametrize(
    ("entry", "other", "own"),
    [
        ("num_labels", 5, 3),
        ("problem_type", "regression", "single_label_classification"),
        ("dtype", "bfloat16", "float32"),
        ("id2label", {0: "x"}, dict(enumerate(CLASSES.names))),
    ],
)
def test_an_entry_that_the_data_decide_is_not_overwritten_in_silence(
    bert: Path, entry: str, other: Any, own: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.config\.{entry}=.*; leave it out"):
        model_of(bert, config={entry: other})
    if isinstance(own, dict):  # the keys of a published config.json are texts
        own = {str(key): name for key, name in own.items()}
    kept, without = (model_of(bert, config=each).model for each in ({entry: own}, {}))
    assert getattr(kept.config, entry) == getattr(without.config, entry)
    model_of(bert, config={entry: other}, fetch=False)  # of a run from before


def test_a_missing_package_is_named_with_the_command(bert: Path, monkeypatch: Patch) -> None:
    find = importlib.util.find_spec
    module = sys.modules["expt.errors"]
    lacks = {"transformers", "peft"}
    monkeypatch.setattr(module, "find_spec", lambda name: None if name in lacks else find(name))
    match = r"^model=transformers: needs transformers; pip install 'expt\[transformers\]'$"
    with pytest.raises(ConfigError, match=match):
        model_of(bert)
    lacks.remove("transformers")
    with pytest.raises(ConfigError, match=r"^model=transformers: needs peft; pip install "):
        model_of(bert, lora={"rank": 2})


def test_nothing_is_printed_while_it_is_built(bert: Path, capfd: Any) -> None:
    model_of(bert, lora=LORA)
    assert capfd.readouterr() == ("", "")


def test_the_files_of_the_published_model_are_part_of_the_identity(
    tmp_path: Path, configured: Configured
) -> None:
    library()
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    words = "model=transformers", f"model.path={folder}"
    config = configured(*words)
    first = identity_of(config)
    assert first.content["base"] == published(config.model)
    (folder / "README.md").write_text("more")
    assert identity_of(config) == first
    elsewhere = folder.rename(tmp_path / "elsewhere")
    moved = dataclasses.replace(config, model=_at(config.model, elsewhere))
    assert identity_of(moved) == first
    (elsewhere / "model.safetensors").write_bytes(b"others")
    assert identity_of(moved).digest != first.digest
    new = dataclasses.replace(moved, model=dataclasses.replace(moved.model, pretrained=False))
    before = identity_of(new)
    (elsewhere / "model.safetensors").unlink()
    assert identity_of(new) == before, "no weights are read"


def _at(model: Any, path: Path) -> Any:
    return dataclasses.replace(model, path=str(path))


def test_a_name_on_the_hub_is_recorded_with_its_commit(
    bert: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    hub: Any = importlib.import_module("huggingface_hub")
    commit = "a" * 40
    folder = tmp_path / "models--me--bert"
    place = folder / "snapshots" / commit
    place.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    for file in bert.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    module = model_of("me/bert")
    assert module.base["commit"] == commit
    config = groups.HuggingFaceModel(name="transformers", path="me/bert")
    assert published_files.folder_of(config) == place
    (older := place.parent / ("b" * 40)).mkdir()
    (older / "tokenizer.json").touch()
    (folder / "refs" / "v1").write_text(older.name)
    node = {"model": {"path": "me/bert", "revision": "v1"}, "dataset": {"tokenizer": "auto"}}
    name = fill_auto(node, Machine(cpus=1))["dataset"]["tokenizer"]
    assert tokenizer.folder_of(name) == older
    with pytest.raises(ConfigError, match=r"^model.revision=v1: model.path=\S+ is a folder; "):
        published_files.folder_of(dataclasses.replace(config, path=str(bert), revision="v1"))
    assert published(config) == published(dataclasses.replace(config, path=str(bert)))


def test_no_step_sends_its_buffers_which_are_constants(bert: Path, configured: Configured) -> None:
    module, two = model_of(bert), dataclasses.replace(ALONE, world_size=2)
    config = configured("model=transformers", f"model.path={bert}")
    assert any(True for _ in module.buffers())
    assert parallel.with_buffers(config, module, two) == []
    module.register_buffer("seen", torch.zeros(1))
    assert len(parallel.with_buffers(config, module, two)) == 1
