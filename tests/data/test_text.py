"""A text: its parts share nothing, each token is a target once, and it is known by what it
holds.
"""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expt.config.identity import digest
from expt.data.kinds import text as text_kind
from expt.data.kinds.text import Extent
from expt.data.loading import Shard
from expt.data.memory import Windows
from expt.errors import DataError, warn_once
from expt.features import NO_TARGET
from expt.inference.tables import inputs_of
from tests.conftest import Configured
from tests.facade import Capture, Patch, as_typed, built, dataset

TEXT = bytes(range(256)) * 2 + b"the end"  # 519 bytes
CPU = torch.device("cpu")


def text(root: Path, **settings: Any) -> Any:
    values = {"context": 10, "val_fraction": 0.1, "test_fraction": 0.2, **settings}
    return dataset("experiment=char_lm dataset.root=x", root=str(root), **values)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


def read(extent: Extent, context: int) -> tuple[bytes, list[int]]:
    """The bytes of a part's windows, and how many of each one's targets count."""
    windows = Windows(extent, context)
    inputs, targets = windows.gather(torch.arange(len(windows)))
    counts = targets != NO_TARGET
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (len(windows), context)
    return bytes([int(inputs[0, 0]), *targets[counts].tolist()]), counts.sum(1).tolist()


@pytest.mark.parametrize("context", [1, 10, 51, 1000])
def test_the_parts_of_a_text_share_no_byte_and_each_token_is_a_target_once(
    file: Path, context: int
) -> None:
    parts = text(file).extents()
    found = [read(part, context) for part in parts if part]
    assert [part for part, _ in found] == [TEXT[:363], TEXT[363:415], TEXT[415:]]
    for part, counts in found:
        assert sum(counts) == len(part) - 1
        assert counts[:-1] == [context] * (len(counts) - 1)
        assert counts[-1] > 0


def test_an_input_is_followed_by_its_target(file: Path) -> None:
    inputs, targets = Windows(text(file).extents()[0], 10).gather(torch.tensor([3, 0]))
    assert inputs.tolist() == [[*range(30, 40)], [*range(10)]]
    assert targets.tolist() == [[*range(31, 41)], [*range(1, 11)]]


def test_a_folder_is_its_files_in_order(tmp_path: Path, file: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    for name, part in (
        ("a.txt", TEXT[:100]),
        ("b/1.txt", b""),
        ("b/2.txt", TEXT[100:105]),
        ("c.txt", TEXT[105:]),
    ):
        (folder / name).write_bytes(part)
    (folder / "notes.md").write_bytes(b"no text")
    for one, several in zip(text(file).extents(), text(folder).extents(), strict=True):
        assert one
        assert several
        assert read(one, 7) == read(several, 7)


def test_batches_are_of_each_workers_windows(file: Path) -> None:
    """37 windows train, and 3 are left for the last batch of 4 workers."""
    whole = built(text(file), batch_size=6, seed=1)
    assert whole.info.features.shapes == {"vocab_size": 256, "context": 10}
    assert (whole.info.train_size, whole.info.val_size, whole.info.test_size) == (37, 6, 11)
    shared = [built(text(file), batch_size=6, seed=1, shard=Shard(rank, 4)) for rank in range(4)]
    for batch, *parts in zip(
        whole.train.epoch(1), *(data.train.epoch(1) for data in shared), strict=True
    ):
        counted = [part for part in parts if not part.weightless]
        assert torch.equal(torch.cat([part.inputs for part in counted]), batch.inputs)
        assert torch.equal(torch.cat([part.targets for part in counted]), batch.targets)
    assert built(text(file, train_limit=5)).info.train_size == 5


def test_a_text_is_known_by_its_bytes(tmp_path: Path, file: Path) -> None:
    before = text(file).fingerprint()
    elsewhere = Path(shutil.copy(file, tmp_path / "elsewhere.txt"))
    assert text(elsewhere).fingerprint() == before
    elsewhere.write_bytes(TEXT[:-1] + b"!")
    assert text(elsewhere).fingerprint() not in (before, None)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("absent.txt", None, "no text is there; give"),
        ("packed.txt", b"\x1f\x8b\x08\x00" * 50, "is compressed; unpack it, e.g. gunzip --keep"),
        ("short.txt", b"0123456789", "of its 10 bytes 1 are left for val, which needs 2 or more"),
        ("empty.txt", b"", "of its 0 bytes 0 are left for train"),
        ("folder/a.md", b"# no text", "no text is there; give"),
    ],
)
def test_what_is_no_text_is_told(
    tmp_path: Path, name: str, content: bytes | None, told: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    dataset = text(path.parent if path.suffix == ".md" else path)
    for look in (dataset.prepare, dataset.fingerprint):
        with pytest.raises(DataError, match=re.escape(told)):
            look()


def test_without_a_fraction_there_is_no_such_part(file: Path) -> None:
    dataset = dataclasses.replace(text(file), val_fraction=0.0, test_fraction=0.0)
    train, val, test = dataset.extents()
    assert train.start == 0
    assert train.stop == len(TEXT)
    assert val is None
    assert test is None


LINES = "the cat sat on the mat\nthe hat of the cat, \u00e9t\u00e9\n" * 20


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A small one of bytes, trained on the text itself."""
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [LINES], library.trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet)
    )
    made.save(str(path := tmp_path / "tokenizer.json"))
    return path


def test_tokens_of_a_tokenizer_are_read_once_and_mapped(
    tokenizer: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(text_kind, "_AT_A_TIME", 100)
    (root := tmp_path / "t.txt").write_text(LINES, encoding="utf-8")
    dataset = text(root, tokens=str(tokenizer))
    whole = dataset.encode(LINES)
    assert len(whole) < len(LINES) / 2
    assert dataset.decode(whole) == LINES
    tokens = dataset._read_once().tokens
    assert (tokens.tolist(), tokens.dtype.name) == (whole, "uint16")
    assert isinstance(dataset._read_once().tokens, np.memmap), "from the cache"
    data = built(dataset)
    assert data.info.features.shapes == {"vocab_size": dataset.vocab_size(), "context": 10}
    assert data.val is not None
    assert data.test is not None
    found = [
        torch.cat([batch.targets[batch.targets != NO_TARGET] for batch in loader.evaluation()])
        for loader in (data.train, data.val, data.test)
    ]
    parts = dataset.extents()
    for targets, part in zip(found, parts, strict=True):
        assert part is not None
        assert targets.tolist() == whole[part.start + 1 : part.stop]
    made = inputs_of(dataset, data.info.features, CPU)("the cat")
    assert made.tolist() == [dataset.encode("the cat")]


def test_a_tokenizers_own_truncation_and_padding_count_for_nothing(
    tokenizer: Path, tmp_path: Path
) -> None:
    (root := tmp_path / "t.txt").write_text(LINES, encoding="utf-8")
    plain = text(root, tokens=str(tokenizer))._read_once().tokens.tolist()
    other = pytest.importorskip("tokenizers").Tokenizer.from_file(str(tokenizer))
    other.enable_truncation(16)
    other.enable_padding(length=9000)
    other.save(str(path := tmp_path / "other.json"))
    dataset = text(root, tokens=str(path))
    assert dataset._read_once().tokens.tolist() == plain == dataset.encode(LINES)


def test_a_run_on_a_tokenizers_tokens_is_known_by_what_its_file_holds(
    tokenizer: Path, tmp_path: Path, configured: Configured
) -> None:
    (tmp_path / "t.txt").write_text(LINES, encoding="utf-8")
    words = (
        *as_typed("task=language_model model=transformer dataset=text"),
        f"dataset.root={tmp_path}/t.txt",
    )
    copied = shutil.copy(tokenizer, tmp_path / "other.json")
    configs = [configured(*words, f"dataset.tokens={path}") for path in (tokenizer, copied)]
    assert digest(configs[0], {}) == digest(configs[1], {}) != digest(configured(*words), {})
    prints = [config.dataset.fingerprint() for config in configs]
    assert prints[0] == prints[1] != configured(*words).dataset.fingerprint()
    Path(copied).write_text(Path(copied).read_text() + "\n")
    assert configs[1].dataset.fingerprint() != prints[0]


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "none.json: cannot be read as a tok"), ("{", "cannot be read as a tok")],
)
def test_a_tokenizer_that_cannot_be_read_is_told(
    content: str | None, told: str, file: Path, tmp_path: Path, tokenizer: Path
) -> None:
    path = tmp_path / "none.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=re.escape(told)):
        text(file, tokens=str(path)).extents()


@pytest.mark.parametrize(
    ("content", "at", "encoding"),
    [
        (LINES.encode("latin-1"), 43, "windows-1252"),
        (("cat\n" * 9000 + "\u00e9").encode("latin-1"), 36000, "windows-1252"),
        (LINES.encode("utf-16"), 3, "utf-16"),
        (LINES.encode("utf-16-le"), 1, "utf-16"),
        (LINES.encode("utf-32"), 2, "utf-32"),
        (("\u732b\u3068\u72ac" * 99 + "\n").encode("utf-16"), 597, "utf-16"),
    ],
)
def test_a_text_that_is_no_utf8_is_refused_by_its_byte(
    content: bytes, at: int, encoding: str, tmp_path: Path, tokenizer: Path
) -> None:
    (root := tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"at byte {at}, .* iconv -f {encoding} "):
        text(root, tokens=str(tokenizer)).extents()
    (root.parent / "u.txt").write_bytes(content)
    with pytest.raises(DataError) as caught:
        text(root.parent, tokens=str(tokenizer)).extents()
    assert len(caught.value.problems) == 2
    for packed, fix in ((b"\x1f\x8b\x08\x00", "gunzip"), (b"PK\3\4\x14\x00", "Excel")):
        root.write_bytes(packed)
        for tokens in ("bytes", str(tokenizer)):
            with pytest.raises(DataError, match=fix):
                text(root, tokens=tokens).extents()


def test_a_prediction_reads_lines_as_the_run_did(tokenizer: Path, tmp_path: Path) -> None:
    """By the tokenizer, too, and never their bytes in place of its tokens."""
    dataset = text(tmp_path, tokens=str(tokenizer))
    (path := tmp_path / "new.txt").write_bytes("the cat\r\n\r\n\u00e9t\u00e9".encode())
    found = [(number, tokens.tolist()) for number, tokens in dataset.lines(str(path))]
    assert found == [(1, dataset.encode("the cat")), (2, []), (3, dataset.encode("\u00e9t\u00e9"))]
    path.write_bytes(b"the cat\n\xe9")
    with pytest.raises(DataError, match="at byte 8, in line 2"):
        [*dataset.lines(str(path))]


def _tokenizer(library: Any, kind: str) -> Any:
    words, models = ["the cat sat"] * 9, library.models
    if kind == "byte":
        made, how = library.Tokenizer(models.BPE()), library.pre_tokenizers.ByteLevel()
        trainer = library.trainers.BpeTrainer(initial_alphabet=how.alphabet())
    else:
        how, unknown = library.pre_tokenizers.Whitespace(), {"special_tokens": ["[?]"]}
        made, trainer = {
            "bpe": (models.BPE(), library.trainers.BpeTrainer()),
            "bpe_unknown": (models.BPE(unk_token="[?]"), library.trainers.BpeTrainer(**unknown)),
            "word": (
                models.WordLevel(unk_token="[?]"),
                library.trainers.WordLevelTrainer(**unknown),
            ),
            "piece": (
                models.WordPiece(unk_token="[?]"),
                library.trainers.WordPieceTrainer(**unknown),
            ),
            "unigram": (
                models.Unigram(),
                library.trainers.UnigramTrainer(vocab_size=20, unk_token="[?]", **unknown),
            ),
        }[kind]
        made = library.Tokenizer(made)
    made.pre_tokenizer = how
    made.train_from_iterator(words, trainer)
    return made


@pytest.mark.parametrize(
    ("kind", "lost"),
    [("bpe", 4), ("bpe_unknown", 4), ("word", 8), ("piece", 8), ("unigram", 4), ("byte", 0)],
)
def test_characters_without_a_token_are_counted(
    tmp_path: Path, capsys: Capture, kind: str, lost: int
) -> None:
    """Also from the cache; in a prediction, too."""
    library = pytest.importorskip("tokenizers")
    _tokenizer(library, kind).save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text(
        "the cat sat " * 93 + "cat\u65e5 s\u65e5\u65e5 \u65e5 the" + "\n" * 40
    )
    one = text(tmp_path / "a.txt", tokens=str(tmp_path / "t.json"))
    for _ in range(2):
        warn_once.cache_clear()
        one.prepare()
        told = capsys.readouterr().err
        assert [f"{lost} of 1170 characters (" in told, "\u65e5" in told] == [lost > 0] * 2
    (tmp_path / "b.txt").write_text("the cat\nsat \u65e5\n")
    assert len([*one.lines(str(tmp_path / "b.txt"))]) == 2
    assert ("1 of 12 characters (8.33%)" in capsys.readouterr().err) == (lost > 0)
