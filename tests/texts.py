"""Tokenizers of a few words, and tables of texts, made without a network."""

import csv
import importlib
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

WORDS = [f"w{number}" for number in range(60)]
CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + ' ' + eos_token }}{% endgeneration %}{% else %}{{ m['content'] + ' ' }}"
    "{% endif %}{% endfor %}"
)


def make_tokenizer(folder: Path, *, kind: str = "bert", template: str | None = None) -> Path:
    """Save one that knows WORDS: with [CLS] and [SEP], or with `<s>` as a causal model's.

    The kind xlnet has [CLS] at its end, in a segment of its own, and pads at the left."""
    library: Any = importlib.import_module("tokenizers")
    is_bert = kind in ("bert", "xlnet")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"] if is_bert else ["[UNK]", "<s>", "</s>"]
    known = {word: place for place, word in enumerate([*special, *WORDS])}
    own = library.Tokenizer(library.models.WordLevel(known, unk_token="[UNK]"))
    own.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    form = {"bert": "[CLS] $A [SEP]", "xlnet": "$A:0 [SEP]:0 [CLS]:2"}.get(kind, "<s> $A")
    own.post_processor = library.processors.TemplateProcessing(
        single=form, special_tokens=[(word, known[word]) for word in special if word in form]
    )
    named: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    if is_bert:
        named = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        names = ["input_ids", "attention_mask", "token_type_ids"]
        named |= {"model_input_names": names, "pad_token_type_id": 3 if kind == "xlnet" else 0}
        named |= {"padding_side": "left"} if kind == "xlnet" else {}
    transformers: Any = importlib.import_module("transformers")
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="[UNK]", chat_template=template, **named
    )
    found.save_pretrained(folder)
    return folder


def some_texts(number: int, seed: int = 0) -> list[str]:
    """Texts whose lengths are log-normal, as those of reviews."""
    drawn = random.Random(seed)
    lengths = [max(1, int(drawn.lognormvariate(2.5, 0.9))) for _ in range(number)]
    return [" ".join(drawn.choice(WORDS) for _ in range(length)) for length in lengths]


def write_csv(path: Path, names: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """Write a table."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return path
