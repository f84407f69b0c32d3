"""Texts of tables: their tokens, the cache of these, padded batches, and batches by length."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from expt.data import tokenizer
from expt.data.build import Data
from expt.data.indexing import by_length, padding, permutation
from expt.data.loader import IndexLoader
from expt.data.loading import Shard
from expt.errors import ConfigError, DataError
from expt.features import NO_TARGET, Features, Text, Tokens
from expt.inference.tables import TextRows
from expt.tasks.classification import Config as Classification
from expt.tasks.language_model import Config as LanguageModel
from expt.tasks.regression import Config as Regression
from tests import facade
from tests.facade import Patch, dataset
from tests.texts import CHAT, make_tokenizer, some_texts, write_csv

CLASS = Classification()
NUMBER = Regression(name="regression", loss="mse")
CAUSAL = LanguageModel(name="language_model")
TABLE = "dataset=table dataset.path=x dataset.targets=y dataset.text=text dataset.tokenizer=x"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("causal"), kind="causal", template=CHAT)


def of(path: Path, tokenizer: Path, **options: Any) -> Any:
    none = {"val_fraction": 0.0, "test_fraction": 0.0, "path": str(path)}
    return dataset(TABLE, tokenizer=str(tokenizer), **{**none, **options})


def spoken(path: Path, tokenizer: Path, *names: str, **options: Any) -> Any:
    """A table whose tokens are predicted, of these columns."""
    keys = ("prompt", "response") if len(names) > 1 else ("messages",)
    given = dict(zip(keys, names, strict=True))
    return of(path, tokenizer, targets=None, text=None, **given, **options)


def read(data: Data) -> list[tuple[list[int], list[int]]]:
    """The tokens of each sample, without padding, and the tokens that follow those."""
    found = []
    for batch in data.train.evaluation():
        lengths = batch.inputs["attention_mask"].sum(1).tolist()
        rows = zip(batch.inputs["input_ids"].tolist(), batch.targets.tolist(), strict=True)
        for (ids, targets), length in zip(rows, lengths, strict=True):
            found.append((ids[:length], targets[:length]))
    return found


@pytest.mark.parametrize("kind", ["bert", "xlnet"])
def test_batches_are_those_of_transformers_own_collator(tmp_path: Path, kind: str) -> None:
    bert = make_tokenizer(tmp_path / "tokenizer", kind=kind)
    texts = ["w1 w2", "", "w3 unheard w5 w6 w7 w8 w9", *some_texts(30)]
    rows = [(text, place % 2) for place, text in enumerate(texts)]
    data = facade.built(
        of(write_csv(tmp_path / "t.csv", "text y".split(), rows), bert, max_tokens=20),
        CLASS,
        batch_size=8,
    )
    transformers: Any = importlib.import_module("transformers")
    own = transformers.AutoTokenizer.from_pretrained(bert)
    collate = transformers.DataCollatorWithPadding(own)
    assert isinstance(data.train, IndexLoader)
    order = data.train.order(1).tolist()
    for place, batch in enumerate(data.train.epoch(1)):
        some = [texts[at] for at in order[8 * place : 8 * place + 8]]
        expected = collate([own(each, truncation=True, max_length=20) for each in some])
        assert torch.equal(batch.inputs["input_ids"], expected["input_ids"])
        assert torch.equal(batch.inputs["attention_mask"], expected["attention_mask"])
        if kind == "xlnet":  # of others all are 0
            assert torch.equal(batch.inputs["token_type_ids"], expected["token_type_ids"])
        assert batch.targets.tolist() == [at % 2 for at in order[8 * place : 8 * place + 8]]
    inputs = data.info.features.inputs
    assert isinstance(inputs, Text)
    assert (inputs.vocab_size, inputs.pad_id, inputs.max_tokens) == (len(own), 0, 20)
    assert inputs.cut == sum(len(own(text)["input_ids"]) > 20 for text in texts)
    assert Features.read(json.loads(json.dumps(data.info.features.record))).inputs == inputs


def test_the_numbers_of_tokens_may_have_holes(tmp_path: Path, bert: Path) -> None:
    folder = tmp_path / "holes"
    shutil.copytree(bert, folder)
    file = folder / "tokenizer.json"
    known = json.loads(file.read_text())
    known["model"]["vocab"]["w9"] = 70_000
    file.write_text(json.dumps(known))
    path = write_csv(tmp_path / "t.csv", ["text", "y"], [("w9", 0), ("w1", 1)])
    data = facade.built(of(path, folder), CLASS)
    inputs = data.info.features.inputs
    assert isinstance(inputs, Text)
    assert inputs.vocab_size == 70_001
    assert read_tensors(data)[0]["input_ids"].max() == 70_000


def test_texts_are_data_whatever_they_look_like(tmp_path: Path, bert: Path) -> None:
    texts = ["-----", "# w1", "w2", "// w3", "", "* w4", "Total: w5"]
    path = write_csv(tmp_path / "t.csv", ["text", "y"], [(x, n) for n, x in enumerate(texts)])
    inputs, targets = read_tensors(facade.built(of(path, bert), NUMBER))
    assert targets.flatten().tolist() == [*range(7)]
    assert inputs["input_ids"][1].tolist()[:3] == [2, 1, 5]
    rows = TextRows(of(path, bert), facade.built(of(path, bert), NUMBER).info.features)
    rows.open([path])
    (piece,) = rows.pieces(100)
    assert (len(piece.about), piece.skipped) == (7, [])


def test_the_number_of_texts_counts_those_by_themselves(tmp_path: Path, bert: Path) -> None:
    path = write_csv(tmp_path / "t.csv", ["text", "y"], [("w1", 0), ("w2", 1), ("w3", 2)])
    rows = TextRows(of(path, bert), facade.built(of(path, bert), NUMBER).info.features)
    rows.take(["w4", "w5"])
    assert rows.size == 2
    parquet.write_table(pa.table({"text": ["w1", "w2", "w3"]}), tmp_path / "t.parquet")
    rows.open([tmp_path / "t.parquet"])
    assert rows.size == 5
    assert sum(len(piece.about) for piece in rows.pieces(2)) == 5


def test_the_first_row_that_cannot_be_read_is_shown(tmp_path: Path, causal: Path) -> None:
    said = json.dumps([{"role": "assistant", "content": "w1"}])
    path = write_csv(tmp_path / "t.csv", ["chat", "n"], [[said, 1], ["w2 {", 2], [said, 3]])
    with pytest.raises(DataError, match=r"^dataset.tokenizer=.*Expecting value.*, such as w2 {$"):
        facade.built(spoken(path, causal, "chat"), CAUSAL)


def test_texts_are_longer_than_the_tokens_that_each_gets(tmp_path: Path, bert: Path) -> None:
    path = write_csv(tmp_path / "t.csv", ["text", "y"], [("w1 w2", 0.5), ("w3", 1)])
    for most in (1, 2):
        with pytest.raises(ConfigError, match=f"dataset.max_tokens={most}: .* adds 2 tokens"):
            facade.built(of(path, bert, max_tokens=most), NUMBER)


def test_tokens_are_made_once(tmp_path: Path, bert: Path, monkeypatch: Patch) -> None:
    path = write_csv(tmp_path / "t.csv", ["text", "y"], [("w1 w2", 0.5), ("w3", 1)])
    first = read_tensors(facade.built(of(path, bert), NUMBER))
    monkeypatch.setattr(tokenizer, "_load", None)
    assert facade.same(read_tensors(facade.built(of(path, bert), NUMBER)), first)
    with pytest.raises(TypeError):  # it would be called for others
        facade.built(of(path, bert, max_tokens=3), NUMBER)


def read_tensors(data: Data) -> Any:
    (batch,) = data.train.evaluation()
    return batch.inputs, batch.targets


def test_targets_may_be_numbers_and_are_scaled_as_of_any_table(tmp_path: Path, bert: Path) -> None:
    rows = [(f"w{place}", place, place % 2) for place in range(8)]
    path = write_csv(tmp_path / "t.csv", ["text", "y", "z"], rows)
    chosen = of(path, bert, targets=("z", "y"), standardise_targets=True)
    _, targets = read_tensors(facade.built(chosen, NUMBER))
    wanted = torch.tensor([[z, y] for _, y, z in rows]).double()
    wanted = (wanted - wanted.mean(0)) / wanted.std(0, correction=0)
    assert torch.allclose(targets, wanted.float(), atol=1e-6)


def test_only_responses_count_and_special_tokens_come_once(tmp_path: Path, causal: Path) -> None:
    rows = [("w1 w2", "w3 w4"), ("w5", ""), ("", "w6")]
    path = write_csv(tmp_path / "t.csv", ["ask", "say"], rows)
    data = facade.built(spoken(path, causal, "ask", "say"), CAUSAL)
    ids = {word: place for place, word in enumerate(["[UNK]", "<s>", "</s>"])}
    ids |= {f"w{n}": n + 3 for n in range(60)}

    def tokens(text: str) -> list[int]:
        return [ids.get(word, NO_TARGET) for word in text.split()]

    assert read(data) == [
        (tokens("<s> w1 w2 w3 w4 </s>"), tokens("_ _ w3 w4 </s> _")),
        (tokens("<s> w5 </s>"), tokens("_ </s> _")),
        (tokens("<s> w6 </s>"), tokens("w6 </s> _")),
    ]
    inputs, targets = data.info.features
    assert isinstance(inputs, Text)
    assert isinstance(targets, Tokens)
    assert (inputs.pad_id, targets.vocab_size) == (ids["</s>"], 63)
    cut = facade.built(spoken(path, causal, "ask", "say", max_tokens=3), CAUSAL)
    assert read(cut)[0] == (tokens("<s> w1 w2"), tokens("_ _ _"))
    with pytest.raises(DataError, match="token to predict"):
        facade.built(spoken(path, causal, "ask", "say", max_tokens=1), CAUSAL)
    plain = facade.built(of(path, causal, text="ask", targets=None), CAUSAL)
    assert read(plain)[0] == (tokens("<s> w1 w2 </s>"), tokens("w1 w2 </s> _"))


@pytest.mark.parametrize("as_json", [False, True])
def test_conversations_go_through_the_tokenizers_own_template(
    tmp_path: Path, causal: Path, as_json: bool
) -> None:
    said = [
        [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}],
        [
            {"role": "user", "content": "w4 w5"},
            {"role": "assistant", "content": "w6"},
            {"role": "user", "content": "w7"},
            {"role": "assistant", "content": "w8"},
        ],
    ]
    cells = [json.dumps(each) for each in said] if as_json else said
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"chat": cells}), path)
    transformers: Any = importlib.import_module("transformers")
    own = transformers.AutoTokenizer.from_pretrained(causal)
    found = read(facade.built(spoken(path, causal, "chat"), CAUSAL))
    for (ids, following), each in zip(found, said, strict=True):
        wanted = own.apply_chat_template(each, return_dict=True, return_assistant_tokens_mask=True)
        assert ids == wanted["input_ids"]
        masks = zip(ids[1:], wanted["assistant_masks"][1:], strict=True)
        assert following == [*(x if counts else NO_TARGET for x, counts in masks), NO_TARGET]
        assert ids.count(own.bos_token_id) == 1


def test_a_hugging_face_dataset_has_texts_too(tmp_path: Path, bert: Path, causal: Path) -> None:
    hf: Any = importlib.import_module("datasets")
    names, texts = ["no", "yes"], [*some_texts(12), ""]
    columns = {"text": texts, "label": [place % 2 for place in range(13)]}
    label = hf.ClassLabel(names=names)
    own = hf.Dataset.from_dict(columns).cast_column("label", label)
    hf.DatasetDict(train=own, validation=own.select(range(4))).save_to_disk(tmp_path / "saved")
    words = "dataset=huggingface dataset.path=x dataset.text=text dataset.tokenizer=x"
    none = {"val_fraction": 0.0, "tokenizer": str(bert)}
    data = facade.built(dataset(words, path=str(tmp_path / "saved"), **none), CLASS)
    rows = [(text, names[place % 2]) for place, text in enumerate(texts)]
    table = of(write_csv(tmp_path / "t.csv", ["text", "y"], rows), bert)
    both = [[*built.train.evaluation()] for built in (data, facade.built(table, CLASS))]
    assert all(facade.same([*a], [*b]) for a, b in zip(*both, strict=True))
    assert data.info.features.targets.names == ("no", "yes")
    assert data.info.val_size == 4
    said = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    (tmp_path / "jsonl").mkdir()
    line = json.dumps({"chat": said, "other": 1})
    (tmp_path / "jsonl" / "train.jsonl").write_text(f"{line}\n" * 3)
    more = {"path": str(tmp_path / "jsonl"), "text": None, "messages": "chat"}
    chats = dataset(words, **more, **{**none, "tokenizer": str(causal)})
    assert read(facade.built(chats, CAUSAL))[2] == ([1, 4, 5, 2], [NO_TARGET, 5, 2, NO_TARGET])


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_a_template_that_marks_no_responses_is_refused(
    tmp_path: Path, template: str | None
) -> None:
    own = make_tokenizer(tmp_path / "own", kind="causal", template=template)
    said = json.dumps([{"role": "assistant", "content": "w1"}])
    path = write_csv(tmp_path / "t.csv", ["chat", "n"], [[said, 1]])
    with pytest.raises(ConfigError, match=r"\{% generation %\}"):
        facade.built(spoken(path, own, "chat"), CAUSAL)


def test_a_text_without_a_token_is_not_masked_wholly(tmp_path: Path, causal: Path) -> None:
    own = json.loads((causal / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**own, "post_processor": None}))
    config = (causal / "tokenizer_config.json").read_text()
    (tmp_path / "tokenizer_config.json").write_text(config)
    path = write_csv(tmp_path / "t.csv", ["text", "y"], [("", 0), ("w1 w2", 1)])
    inputs, _ = read_tensors(facade.built(of(path, tmp_path), NUMBER))
    assert inputs["input_ids"].tolist() == [[2, 2], [4, 5]]
    assert inputs["attention_mask"].tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize(("size", "batch"), [(100, 8), (96, 8), (7, 8), (3, 1), (4000, 16)])
def test_an_order_by_lengths_has_each_sample_once(size: int, batch: int) -> None:
    lengths = torch.tensor([len(text.split()) for text in some_texts(size)])
    order = permutation(size, 1, 2)
    found = by_length(order, lengths, batch, 1, 2)
    assert found.sort().values.tolist() == [*range(size)]
    assert found.tolist() == by_length(order, lengths, batch, 1, 2).tolist()
    rest = size % batch
    assert found[size - rest :].tolist() == order[size - rest :].tolist()
    if size == 4000:
        assert padding(order, lengths, batch) > 0.5
        assert padding(found, lengths, batch) < 0.2
        halves = lengths[found].view(-1, 2, batch // 2).sum((0, 2)).tolist()  # of two workers
        assert halves[0] == pytest.approx(halves[1], rel=0.03)
        assert found.tolist() != by_length(order, lengths, batch, 1, 3).tolist()


def test_workers_share_the_same_batches_by_length(tmp_path: Path, bert: Path) -> None:
    rows = [(text, place % 2) for place, text in enumerate(some_texts(66))]
    path = write_csv(tmp_path / "t.csv", ["text", "y"], rows)
    chosen = of(path, bert, group_by_length=True)

    def batches(rank: int, size: int, skip: int = 0) -> list[list[tuple[Any, ...]]]:
        data = facade.built(chosen, CLASS, batch_size=8, shard=Shard(rank, size))
        return [
            [
                (*[x for x, there in zip(*row, strict=True) if there], label)
                for *row, label in zip(
                    batch.inputs["input_ids"].tolist(),
                    batch.inputs["attention_mask"].tolist(),
                    batch.targets.tolist(),
                    strict=True,
                )
            ]
            for batch in data.train.epoch(2, skip)
        ]

    alone = batches(0, 1)
    pairs = zip(batches(0, 2), batches(1, 2), strict=True)
    assert [first + second for first, second in pairs] == alone
    assert batches(0, 1, 3) == alone[3:]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("dataset.text=nope", "dataset.text=nope"),
        ("dataset.tokenizer=null", "dataset.tokenizer"),
        ("dataset.tokenizer=./nowhere", "dataset.tokenizer=./nowhere"),
        ("dataset.text=null dataset.max_tokens=5", "dataset.max_tokens"),
        ("dataset.prompt=text", "dataset.text, prompt"),
        ("dataset.features=[y]", "dataset.features"),
        ("dataset.group_by_length=true dataset.shuffle=false", "dataset.group_by_length"),
        ("dataset.targets=null", "dataset.targets"),
        ("task=language_model", "dataset.targets"),
        ("task=language_model dataset.text=null", "task=language_model"),
        ("dataset.text=null dataset.prompt=text dataset.targets=null", "dataset.prompt"),
        ("dataset.text=y", "dataset.targets and dataset.text=y"),
    ],
)
def test_bad_keys_are_refused_before_anything_is_trained(
    tmp_path: Path, bert: Path, typed: Any, words: str, key: str
) -> None:
    path = write_csv(tmp_path / "t.csv", ["text", "y"], [("w1", 0), ("w2", 1)])
    usual = f"dataset=table dataset.path={path} dataset.text=text dataset.targets=y"
    given = dict(word.split("=", 1) for word in f"{usual} dataset.tokenizer={bert} {words}".split())
    found = typed(*map("=".join, given.items()))
    assert found.returncode == 2
    assert key in found.stderr
