"""Write a small BERT of random weights with its tokenizer, and a table of generated reviews."""

import argparse
import csv
import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast, set_seed

GOOD, BAD = "good great fine lovely".split(), "bad dull poor awful".split()
WORDS = "a the film plot actor scene ending was is so rather never not".split()


def review(verdict, draw):
    """Return words of which one says the verdict, or the contrary after `not`."""
    text = draw.choices(WORDS[:-1], k=draw.randint(2, 12))
    turned = draw.random() < 0.3
    word = draw.choice(GOOD if (verdict == "good") != turned else BAD)
    place = draw.randrange(len(text))
    return " ".join([*text[:place], *(["not"] if turned else []), word, *text[place:]])


def write(folder, rows, width=64):
    """Write `tiny/` and `reviews.csv`."""
    known = {word: place for place, word in enumerate(["[PAD]", "[UNK]", *WORDS, *GOOD, *BAD])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder / "tiny")
    set_seed(0)
    config = BertConfig(
        vocab_size=len(known),
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertForMaskedLM(config).save_pretrained(folder / "tiny")
    draw = random.Random(0)
    with open(folder / "reviews.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "verdict"])
        for _ in range(rows):
            verdict = draw.choice(["good", "bad"])
            table.writerow([review(verdict, draw), verdict])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4000)
    write(Path(), parser.parse_args().rows)
