"""Runs of models of transformers: used without the published files, and exported for others."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import expt
from expt.command import export as command
from expt.errors import ConfigError, RunFailed
from tests.conftest import Trained, Typed
from tests.facade import Capture, RunFolder, as_typed, same
from tests.models.test_hugging_face import INPUTS, library, save
from tests.texts import CHAT, make_tokenizer, some_texts, write_csv

SHORT = as_typed(
    "model=transformers dataset=table dataset.text=text dataset.max_tokens=16 debug=true"
    " batch_size=8 max_steps=2 optimizer=adamw scheduler=constant tensorboard.images=false"
)
LORA = "model.lora.rank=2"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "texts.csv"
    rows = ((text, "no yes".split()[i % 2], i / 7) for i, text in enumerate(some_texts(40)))
    return write_csv(path, ["text", "sort", "number"], rows)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of published models, with their tokenizers."""
    library()
    root = tmp_path_factory.mktemp("bases")
    make_tokenizer(save(root / "bert", "BertForMaskedLM"))
    causal = save(root / "llama", "LlamaForCausalLM", tie_word_embeddings=True, eos_token_id=2)
    make_tokenizer(causal, kind="causal", template=CHAT)
    return root


@pytest.fixture
def words(table: Path, bases: Path, tmp_path: Path) -> Sequence[str]:
    """Of a classifier, whose published model may be changed."""
    shutil.copytree(bases / "bert", tmp_path / "bert")
    given = f"dataset.path={table}", "dataset.targets=sort", f"model.path={tmp_path / 'bert'}"
    return (*SHORT, *given)


def exported(run: RunFolder, *more: str) -> Path:
    assert command.main([str(run.folder), "--format", "huggingface", *more]) == 0
    return run.folder / "huggingface"


@pytest.mark.slow
def test_a_run_that_has_all_weights_needs_no_published_ones(
    trained: Trained, words: Sequence[str], tmp_path: Path
) -> None:
    run = trained(*words)
    with pytest.raises(ConfigError, match="--format huggingface makes it a folder for "):
        trained(*words, LORA, f"weights={run.folder}", name="adapters")
    (tmp_path / "bert" / "model.safetensors").unlink()
    assert trained(*words, "resume=auto", "max_steps=3").result["steps"] == 3
    shutil.rmtree(tmp_path / "bert")
    folder = exported(run, "--which", "last")
    transformers = library()
    other = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert other.config.id2label == {0: "no", 1: "yes"}
    assert other.config.architectures == ["BertForSequenceClassification"]
    last = expt.load(run.folder, "last")
    with torch.no_grad():
        assert torch.equal(other(**INPUTS).logits, last(INPUTS))
    assert len(transformers.AutoTokenizer.from_pretrained(folder)) == 64


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # of peft's own
@pytest.mark.slow
def test_adapters_need_the_published_weights_they_were_trained_with(
    trained: Trained, words: Sequence[str], tmp_path: Path, capsys: Capture
) -> None:
    run = trained(*words, LORA, "optimizer.lr=0.1")
    saved = run.state("best")["model"]
    assert sum(one.numel() for one in saved.values()) == 2 * 2 * 4 * 32 // 2 + 16 * 17 + 2 * 17
    with torch.no_grad():
        wanted = expt.load(run.folder)(INPUTS)
    folder, adapters = exported(run), tmp_path / "adapters"
    exported(run, "--adapters", "--output", str(adapters))
    transformers, peft = library(), pytest.importorskip("peft")
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(adapters)
    assert config.id2label == {0: "no", 1: "yes"}
    auto = peft.AutoPeftModelForSequenceClassification
    with torch.no_grad():
        for other in (merged, auto.from_pretrained(adapters, num_labels=2)):
            torch.testing.assert_close(other.eval()(**INPUTS).logits, wanted, atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match=r"huggingface: is there already; remove it, or "):
        exported(run)
    save(tmp_path / "bert", "BertForMaskedLM", seed=1)
    match = r"^model.path=\S*/bert: its files are not those that the run began from, and "
    with pytest.raises(ConfigError, match=match):
        expt.load(run.folder)
    with pytest.raises(ConfigError, match=r"^model.path=\S*/bert: its files are not those that "):
        trained(*words, LORA, "optimizer.lr=0.1", "max_steps=3", "resume=auto")
    trained(*words, LORA, f"weights={run.folder}", name="others")
    assert "its adapters are of other files than model.path's" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "bert")
    with pytest.raises(
        ConfigError, match=f"; the run began from {tmp_path / 'bert'}, .* link to it$"
    ):
        expt.load(run.folder)


@pytest.mark.slow
def test_a_causal_model_is_exported_with_its_tied_weights_once(
    trained: Trained, table: Path, bases: Path
) -> None:
    given = f"dataset.path={table}", "task=language_model", f"model.path={bases / 'llama'}"
    run = trained(*SHORT, *given)
    folder = exported(run)
    safetensors = pytest.importorskip("safetensors")
    for file in (folder / "model.safetensors", run.paths.best):
        with safetensors.safe_open(file, "pt") as opened:
            names = [*opened.keys()]
        tied = [x for x in names if x.endswith(("embed_tokens.weight", "lm_head.weight"))]
        assert len([x for x in tied if not x.startswith("optimizer.")]) == 1
    other = library().AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = INPUTS["input_ids"] % 63
    with torch.no_grad():
        found = expt.load(run.folder)({"input_ids": ids})
        torch.testing.assert_close(other(ids).logits, found, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.")  # of peft
def test_adapters_of_tied_embeddings_are_exported_alone(
    trained: Trained, table: Path, bases: Path, tmp_path: Path
) -> None:
    given = f"dataset.path={table}", "task=language_model", f"model.path={bases / 'llama'}"
    targets = "model.lora.targets=[embed_tokens]", "optimizer.lr=0.1"
    run = trained(*SHORT, *given, LORA, *targets)
    with pytest.raises(RunFailed, match=r"huggingface: is not written: .*; --adapters "):
        exported(run)
    exported(run, "--adapters", "--output", str(tmp_path / "adapters"))


@pytest.mark.slow
def test_a_model_that_looks_for_the_end_of_each_text_is_exported(
    trained: Trained, table: Path, tmp_path: Path
) -> None:
    library()
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0}
    folder = make_tokenizer(save(tmp_path / "t5", "T5ForConditionalGeneration", **sizes, **ends))
    run = trained(*SHORT, f"dataset.path={table}", "dataset.targets=sort", f"model.path={folder}")
    other = library().AutoModelForSequenceClassification.from_pretrained(exported(run)).eval()
    ids = INPUTS["input_ids"] % 60 + 4
    ids[:, -1] = 3
    with torch.no_grad():
        found = expt.load(run.folder)({"input_ids": ids})
        torch.testing.assert_close(other(ids).logits, found)


def test_a_model_that_is_not_there_is_named_before_the_data(
    words: Sequence[str], tmp_path: Path, typed: Typed
) -> None:
    shutil.rmtree(tmp_path / "bert")
    found = typed(*words)
    assert found.returncode == 2
    assert f"error: model.path={tmp_path / 'bert'}: " in found.stderr


def test_what_does_not_go_with_the_format_is_refused(
    trained: Trained, words: Sequence[str], tmp_path: Path
) -> None:
    plain = trained("debug=true", "max_steps=1", "model=mlp", name="plain")
    run = trained(*words)
    for folder, more, match in (
        (plain.folder, ["huggingface"], "^--format huggingface: the run's model is model=mlp; "),
        (run.folder, ["huggingface", "--preprocess"], "^--preprocess: does not go with "),
        (run.folder, ["onnx", "--adapters"], "^--adapters: does not go with --format onnx"),
        (run.folder, ["huggingface", "--adapters"], "^--adapters: the run trained all weights"),
    ):
        with pytest.raises(ConfigError, match=match):
            command.main([str(folder), "--format", *more])
    (other := tmp_path / "other").mkdir()
    own = other / "tsconfig.json"
    own.touch()
    with pytest.raises(ConfigError, match=r"^\S*other: is there already; remove it, or "):
        exported(run, "--output", str(other), "--force")
    own.unlink()
    exported(run, "--output", str(other))  # an empty one
    assert (other / "config.json").exists()


@pytest.mark.slow
def test_an_evaluation_needs_no_published_weights_but_those_under_adapters(
    trained: Trained, words: Sequence[str], tmp_path: Path, typed: Typed
) -> None:
    folders = [trained(*words, *more, name=f"{len(more)}").folder for more in ([], [LORA])]
    shutil.rmtree(tmp_path / "bert")
    found = [typed("evaluate", str(folder)) for folder in folders]
    assert [one.returncode for one in found] == [0, 2]
    assert "error: model.path=" in found[1].stderr


class Weighs(expt.Callback):
    """Shows outputs of the model, which has all of its weights."""

    def on_epoch_end(self, view: expt.View) -> None:
        inputs = {name: one.clone() for name, one in INPUTS.items()}
        view.scalar("mine/outputs", view.model(inputs).sum().item())


@pytest.mark.slow
def test_callbacks_get_the_published_weights_under_sharded_adapters(
    trained: Trained, words: Sequence[str]
) -> None:
    words = [word for word in words if word != "debug=true"]
    own = LORA, "world_size=2", "optimizer.lr=0.1", f"callbacks=[{{_target_: {__name__}.Weighs}}]"
    runs = [trained(*words, *own, f"strategy={x}", name=x) for x in ("fsdp", "ddp")]
    (found,), (wanted,) = (run.curve("mine/outputs") for run in runs)
    assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
def test_a_killed_run_of_adapters_resumes_to_the_bit(
    trained: Trained, words: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word for word in words if word not in ("debug=true", "max_steps=2")]
    words += as_typed("model.lora.rank=2 model.lora.dropout=0.1 epochs=2 world_size=2 log_every=1")
    whole = trained(*words, name="whole")
    monkeypatch.setenv("EXPT_FAULT", "1:4:kill:once")
    with pytest.raises(RunFailed):
        trained(*words, "checkpoint.every_steps=1", name="killed")
    monkeypatch.delenv("EXPT_FAULT")
    killed = trained(*words, "checkpoint.every_steps=1", "resume=auto", name="killed")
    assert same(killed.state()["model"], whole.state()["model"])
    assert killed.curve("running/loss") == whole.curve("running/loss")
    assert json.loads((killed.folder / "result.json").read_text())["attempts"] >= 1
