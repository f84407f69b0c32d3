"""Runs on texts: trained by several workers, killed, evaluated elsewhere, and used."""

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import expt
from tests.conftest import Trained, Typed
from tests.facade import Patch, RunFolder, as_typed, same
from tests.integration.test_resume import kill_at
from tests.texts import make_tokenizer, some_texts, write_csv

BAG = """
import torch
class Bag(torch.nn.Module):
    def __init__(self, num_classes, vocab_size):
        super().__init__()
        self.words = torch.nn.Embedding(vocab_size, 8)
        self.head = torch.nn.Linear(8, num_classes)
    def forward(self, text):
        mask = text["attention_mask"].unsqueeze(-1).float()
        words = self.words(text["input_ids"]) * mask
        return self.head(words.sum(1) / mask.sum(1).clamp(min=1))
class Next(torch.nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.words = torch.nn.Embedding(vocab_size, 8)
        self.head = torch.nn.Linear(8, vocab_size)
    def forward(self, text):
        return self.head(self.words(text["input_ids"]))
"""
MODEL = "~model.hidden ~model.dropout init=default batch_size=16 epochs=2"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, two tokenizers and a table."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "bags.py").write_text(BAG)
    make_tokenizer(folder / "bert")
    make_tokenizer(folder / "causal", kind="causal")
    texts = some_texts(200)
    rows = [(f"n{n}", text, "w1 w2", "ab"[n % 2]) for n, text in enumerate(texts)]
    write_csv(folder / "t.csv", ["id", "said", "asked", "kind"], rows)
    return folder


@pytest.fixture
def words(place: Path, monkeypatch: Patch) -> str:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    given = f"dataset=table dataset.path={place / 't.csv'} dataset.text=said dataset.targets=kind"
    return f"{given} dataset.tokenizer={place / 'bert'} +model._target_=bags.Bag {MODEL}"


@pytest.mark.slow
def test_workers_train_on_the_same_batches_of_similar_texts(words: str, trained: Trained) -> None:
    words = f"{words} dataset.group_by_length=true dataset.max_tokens=40"
    two = trained(*as_typed(f"{words} world_size=2"), name="two")
    one = trained(*as_typed(f"{words} world_size=1"), name="one")
    for tag in ("loss/train", "loss/val"):
        pairs = zip(one.curve(tag), two.curve(tag), strict=True)
        assert all(a[1] == pytest.approx(b[1], rel=1e-5) for a, b in pairs)
    inputs = two.result["data"]["inputs"]
    assert inputs["padding"][1] < inputs["padding"][0]
    assert (inputs["feature"], inputs["is_grouped"]) == ("Text", True)


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_bits(
    words: str, tmp_path: Path, trained: Trained
) -> None:
    given = as_typed(f"{words} dataset.group_by_length=true checkpoint.every_steps=5 log_every=5")
    shutil.copy("bags.py", tmp_path)
    whole = trained(*given, name="whole")
    kill_at(tmp_path / "killed", given, 15, EXPT_FAULT="0:17:hang")
    killed = trained(*given, "resume=auto", name="killed")
    assert killed.result["resumed_from"]["step"] >= 10
    assert same(killed.state()["model"], whole.state()["model"])
    assert same(killed.state()["optimizer"], whole.state()["optimizer"])


@pytest.mark.slow
def test_a_run_is_used_without_its_tokenizers_folder(
    place: Path, words: str, trained: Trained, typed: Typed, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    shutil.copytree(place / "bert", own)
    run = trained(*as_typed(words.replace(str(place / "bert"), str(own))))
    shutil.rmtree(own)
    model = expt.load(run.folder)
    some = ["w1 w2 w3", "", "w7"]
    with torch.no_grad():
        logits = model(model.preprocess(some))
    lines = typed("predict", str(run.folder), *(f"--text={text}" for text in some)).stdout
    names = logits.argmax(1).tolist()
    found = [line.split()[2] for line in lines.splitlines() if "w3" in line]
    assert found
    assert "ab"[names[0]] in lines
    rows = [(n, text, "ab"[n % 2], "x") for n, text in enumerate(some)]
    other = write_csv(tmp_path / "new.csv", ["id", "said", "kind", "more"], rows)
    done = typed("predict", str(run.folder), str(other), "--output", str(tmp_path / "out.csv"))
    assert done.returncode == 0
    assert "column said: 1 cells are empty" in done.stderr
    with (tmp_path / "out.csv").open() as file:
        answers = [*csv.DictReader(file)]
    assert [each["class"] for each in answers] == ["ab"[name] for name in names]
    assert [(each["row"], each["more"]) for each in answers] == [("1", "x"), ("2", "x"), ("3", "x")]
    chances = logits.softmax(1)[:, 0].tolist()
    assert [float(each["p_a"]) for each in answers] == pytest.approx(chances, rel=1e-5)
    done = typed("evaluate", str(run.folder), f"dataset.path={other}")
    assert done.returncode == 0
    measured = RunFolder(next((run.folder / "evaluations").iterdir())).result["metrics"]
    wanted = sum(
        answer["class"] == answer_of[2] for answer, answer_of in zip(answers, rows, strict=True)
    )
    assert measured["accuracy/all"] == pytest.approx(wanted / 3)
    test = typed("predict", str(run.folder), "--split", "test", "--output", str(tmp_path / "t.csv"))
    assert test.returncode == 0
    assert typed("predict", str(run.folder), str(place / "bags.py")).returncode == 2
    (tmp_path / "form.csv").write_text("id,kind\nn1,a\n")
    form = ("--template", str(tmp_path / "form.csv"), "--output", str(tmp_path / "filled.csv"))
    assert typed("predict", str(run.folder), "--text", "w1", *form).returncode == 2
    (tmp_path / "bad.csv").write_text("said,id\nw1,2,3\n")
    bad = typed("predict", str(run.folder), str(tmp_path / "bad.csv"))
    assert bad.returncode == 2
    assert "row 1: has 3 cells" in bad.stderr


@pytest.mark.slow
def test_a_causal_model_says_how_likely_responses_are(
    place: Path, words: str, trained: Trained, typed: Typed, tmp_path: Path
) -> None:
    del words
    given = (
        f"task=language_model dataset=table dataset.path={place / 't.csv'} dataset.prompt=asked"
        f" dataset.response=said dataset.tokenizer={place / 'causal'} +model._target_=bags.Next"
        f" {MODEL}"
    )
    run = trained(*as_typed(given))
    out = tmp_path / "out.csv"
    done = typed("predict", str(run.folder), str(place / "t.csv"), "--output", str(out))
    assert done.returncode == 0
    with out.open() as file:
        first = next(csv.DictReader(file))
    model = expt.load(run.folder)
    with (place / "t.csv").open() as file:
        row = next(csv.DictReader(file))
    batch: Any = model.preprocess([(row["asked"], row["said"])])
    pair: Any = model.preprocess((row["asked"], row["said"]))
    assert torch.equal(pair["input_ids"], batch["input_ids"])
    three: Any = [model.preprocess(each(["w1", "w1 w2", "w2"])) for each in (list, tuple)]
    assert torch.equal(three[0]["input_ids"], three[1]["input_ids"])
    prompt: Any = model.preprocess("w1 w2")
    with torch.no_grad():
        chances = model(batch).log_softmax(-1)[0]
    ids = batch["input_ids"][0].tolist()
    own = [-float(chances[at - 1, ids[at]]) for at in range(3, len(ids))]
    assert ids[:3] == [1, 4, 5]
    assert prompt["input_ids"].tolist() == [ids[:3]]
    assert int(first["tokens"]) == len(own)
    assert float(first["loss"]) == pytest.approx(sum(own) / len(own), rel=1e-5)
    assert typed("predict", str(run.folder), "--text", "w1").returncode == 2
