"""Inputs of a sample: an image, columns of a table, or tokens, which are targets too."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from expt.errors import ConfigError, DataError, listed
from expt.features.feature import Answers, Anything, Arrays, Feature, Record, at_least_single
from expt.late import np, torch

if TYPE_CHECKING:
    from torch import Generator, Tensor

_DRAWN = 8
"""Tokens of a random text."""
ROLES = {"text": ("text",), "prompt": ("prompt", "response"), "messages": ("messages",)}
"""The keys of a dataset that name columns of texts, by the first."""
NO_TARGET = -100
"""The target of a token that counts for nothing: torch's cross-entropy ignores it."""


@dataclass(frozen=True, kw_only=True)
class Image(Feature):
    """Images [channels, height, width] of pixels, normalised."""

    noun: ClassVar[str] = "image"
    is_image: ClassVar[bool] = True
    channels: int
    image_size: tuple[int, int]

    @property
    def shapes(self) -> Mapping[str, Any]:
        return {"channels": self.channels, "image_size": self.image_size}


class Encoding(TypedDict, total=False):
    """How a column of texts, of dates or with gaps becomes numbers, as a record has it."""

    categories: Sequence[str | None]
    """The texts, each a column of 0 and 1; None: a gap."""
    median: float
    """The value of gaps among numbers."""
    gaps: int
    """Training rows with one; if there are any, a column of 0 and 1 marks them."""
    flags: Sequence[str]
    """The texts of 0 and 1."""
    way: str
    """The way in which numbers are written; see `written.WAYS`."""


@dataclass(frozen=True, kw_only=True)
class Columns(Feature):
    """Rows of a table's columns of numbers, after texts and gaps are encoded."""

    noun: ClassVar[str] = "row"
    width: int
    """How many numbers a row becomes."""
    encoded: Mapping[str, Encoding] = dataclasses.field(default_factory=dict)
    """The encodings of columns that have one; see `table_source.Encoder`."""
    means: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The means of columns that are not standardised, for gaps in other rows."""
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why other columns are neither inputs nor targets."""

    @property
    def filled(self) -> set[str]:
        """The columns of numbers whose gaps have a value."""
        gaps = (name for name, how in self.encoded.items() if "median" in how)
        return {*gaps, *self.means, *self.scales}

    @property
    def coarse(self) -> list[str]:
        """The columns of numbers too large for float32 to hold a thousandth of their deviation."""
        steps = {
            x: float(np.spacing(np.float32(abs(mean)))) for x, (mean, _) in self.scales.items()
        }
        return [x for x, step in steps.items() if step >= 1 and 500 * step > self.scales[x][1]]

    @property
    def cell_names(self) -> list[str]:
        """The columns of a table that they are of: one of dates is several of these."""
        dates = {name for name, how in self.encoded.items() if _is_date(how)}
        names = (name.rpartition(".")[0] if name in dates else name for name in self.names)
        return [*dict.fromkeys(names)]

    @property
    def shapes(self) -> Mapping[str, Any]:
        # Those of an image of one row, so that a model of images may flatten it.
        return {"channels": 1, "image_size": (1, self.width)}

    @property
    def settings(self) -> Mapping[str, Any]:
        # The columns of an array have no names in a table.
        return {} if any("[" in name for name in self.names) else {"features": self.cell_names}

    def drawn(self, number: int, generator: Generator) -> Tensor:
        found = torch.randn((number, self.width), generator=generator)
        scales = itertools.chain.from_iterable(map(self._scales_of, self.names))
        mean, deviation = torch.tensor([*scales] or [(0.0, 1.0)]).T
        return torch.addcmul(mean, found, deviation)

    def _scales_of(self, name: str) -> list[tuple[float, float]]:
        """Return the mean and deviation of each number that a column becomes."""
        how, plain = self.encoded.get(name, {}), (0.0, 1.0)
        if "categories" in how:
            return [plain] * len(how["categories"])
        return [self.scales.get(name, plain), *([plain] if how.get("gaps") else ())]

    def drawn_as_read(self, number: int, generator: Generator) -> Tensor:
        """Return random rows before they are encoded: places of categories, and nan for gaps."""
        columns: list[Tensor] = []
        for name in self.names:
            how, values = self.encoded.get(name, {}), torch.randn(number, generator=generator)
            mean, deviation = self.scales.get(name, (self.means.get(name, 0.0), 1.0))
            most = len(how.get("categories", ())) + 1
            places = torch.randint(most, (number,), generator=generator) - 1.0
            cells = places if "categories" in how else mean + deviation * values
            is_gap = torch.rand(number, generator=generator) < 0.2
            columns.append(torch.where(is_gap, torch.nan, cells))
        return torch.stack(columns, dim=1)

    def in_words(self) -> Iterator[str]:
        if not self.encoded:
            return
        plain = [name for name in self.names if name not in self.encoded]
        lines = [f"{listed(plain, 6):10} numbers"] if plain else []
        several = ("year", "month", "weekday")  # the parts of a date are one line
        lines += [
            f"{name.removesuffix('.days') if _is_date(how) else name:10} {_become(how)}"
            for name, how in self.encoded.items()
            if not (_is_date(how) and name.endswith(several))
        ]
        head = f"columns      {self.width} from {len(self.cell_names)}:"
        yield from listed([head, *lines], 12, "\n  ").split("\n")


def _is_date(how: Encoding) -> bool:
    return "year" in how.get("way", "")


def _become(how: Encoding) -> str:
    """Return the encoding of a column of texts or with gaps."""
    if texts := how.get("categories"):
        some = listed(("no value" if text is None else text for text in texts), 4)
        return f"{len(texts)} columns of 0 and 1: {some}"
    words = [f"0 and 1 for {', '.join(how['flags'])}" if "flags" in how else "numbers"]
    words = ["year, month, weekday and days since 1970"] if _is_date(how) else words
    words += [f"written as {how['way']}"] if "way" in how else []
    if "median" in how:
        words.append(f"{how['gaps']} gaps in train become the median {how['median']:g}")
        if how["gaps"]:
            words.append("a column of 0 and 1 marks them")
    return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class Tokens(Feature):
    """Tokens of a text; as targets those that follow.

    A prediction is how likely a text is: the mean loss of its tokens but the first [nats], and the
    perplexity.
    """

    noun: ClassVar[str] = "window"
    each: ClassVar[str] = "token"
    outputs: ClassVar[str] = "logits of the next token"
    vocab_size: int
    context: int

    @classmethod
    def of_custom(cls, targets: Any, dataset: Any, task: Any) -> Feature:
        if not hasattr(dataset, "vocab_size"):
            return Anything.like(targets)
        return cls(vocab_size=dataset.vocab_size, context=dataset.context)

    @property
    def shapes(self) -> Mapping[str, Any]:
        """Both; no length of texts that have any."""
        sizes = {"vocab_size": self.vocab_size, "context": self.context}
        return {name: size for name, size in sizes.items() if size}

    def drawn(self, number: int, generator: Generator) -> Tensor:
        return torch.randint(self.vocab_size, (number, self.context), generator=generator)

    def check(self, sample: Any) -> Any:
        is_pair = isinstance(sample, list | tuple) and len(sample) == 2
        for name, tokens in zip(("inputs", "targets"), sample if is_pair else (), strict=False):
            if not isinstance(tokens, torch.Tensor):
                continue
            if tokens.is_floating_point():
                raise DataError(f"its {name} are {tokens.dtype}; let them be tokens, int64")
            wrong = (tokens < 0) | (tokens >= self.vocab_size)
            if name == "targets":
                wrong &= tokens != NO_TARGET
            if wrong.any():
                more = f", or {NO_TARGET} where nothing counts" if name == "targets" else ""
                raise DataError(
                    f"its {name} hold the token {int(tokens[wrong][0])}, expected 0 to"
                    f" {self.vocab_size - 1} (vocab_size){more}; fix it, or vocab_size"
                )
        return sample

    def decoded(self, predicted: Any, targets: Any) -> tuple[Arrays, Mapping[str, Any]]:
        """Return the summed loss of each window, and its tokens."""
        logits, wanted = at_least_single(predicted).flatten(0, -2), targets.flatten().long()
        each = torch.nn.functional.cross_entropy(
            logits, wanted, ignore_index=NO_TARGET, reduction="none"
        )
        sums, counts = each.double().view(targets.shape).sum(1), (targets != NO_TARGET).sum(1)
        return {"tokens": counts.cpu().numpy(), "loss": sums.cpu().numpy()}, {}

    def answer(self, arrays: Mapping[str, list[Any]], place: int) -> Record:
        return {name: arrays[name][place] for name in ("tokens", "loss", "perplexity")}

    def joined(self, several: Iterable[Answers]) -> Iterator[Answers]:
        """Yield the windows of one text as one sample, with means in the place of sums."""
        windows = itertools.chain.from_iterable(
            zip(one.about, *(one.arrays[x].tolist() for x in ("tokens", "loss")), strict=True)
            for one in several
        )
        texts = map(_summed, itertools.groupby(windows, key=operator.itemgetter(0)))
        while some := list(itertools.islice(texts, 1024)):
            about, tokens, sums = zip(*some, strict=True)
            with np.errstate(invalid="ignore", over="ignore"):
                loss = np.array(sums) / np.where(tokens, tokens, np.nan)
                arrays = {"tokens": np.array(tokens), "loss": loss, "perplexity": np.exp(loss)}
            yield Answers(about, arrays)


@dataclass(frozen=True, kw_only=True)
class Text(Feature):
    """Tokens of texts: `input_ids` and `attention_mask`, int64 [B, T], T the longest of a batch.

    `names` are the columns of a table that are read. Shorter texts end with `pad_id`, masked.
    """

    noun: ClassVar[str] = "text"
    loose: ClassVar[Collection[str]] = ("context",)
    tokenizer: str
    """The folder or the name of the model on the Hub that has it."""
    digest: str
    """A digest of its files."""
    role: str = "text"
    """The key of the dataset that names the columns: text, prompt (and response), messages."""
    vocab_size: int
    pad_id: int
    pads_left: bool = False
    """True if shorter texts begin with `pad_id` instead."""
    pad_type: int | None = None
    """The segment of padding in `token_type_ids`, for models that need these."""
    max_tokens: int | None = None
    """The length that longer texts are cut to."""
    lengths: tuple[int, int, float] = (0, 0, 0.0)
    """The least, the most, and the mean number of tokens."""
    cut: int = 0
    """How many texts were longer."""
    padding: tuple[float, float] | tuple[()] = ()
    """The share of padding among the tokens of an epoch, in random order and in groups."""
    is_grouped: bool = False
    """True if batches are of similar lengths."""

    @property
    def shapes(self) -> Mapping[str, Any]:
        return {"vocab_size": self.vocab_size, "context": self.max_tokens or self.lengths[1]}

    @property
    def settings(self) -> Mapping[str, Any]:
        columns = zip(ROLES[self.role], self.names, strict=True)
        return {**dict(columns), "tokenizer": self.tokenizer, "max_tokens": self.max_tokens}

    def drawn(self, number: int, generator: Generator) -> Any:
        ids = torch.randint(self.vocab_size, (number, _DRAWN), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def differing(self, other: Feature) -> Iterator[str]:
        if isinstance(other, Text) and other.digest != self.digest:
            yield "were trained with another tokenizer"

    def fit(self, trained: Feature, label: str) -> tuple[Sequence[int] | None, str]:
        if getattr(trained, "digest", self.digest) != self.digest:
            raise ConfigError(
                f"dataset.tokenizer={self.tokenizer}: its files are other than those of the run;"
                " use the run's"
            )
        return super().fit(trained, label)

    def in_words(self) -> Iterator[str]:
        least, most, mean = self.lengths
        cut = f"; {self.cut:,} are cut to {self.max_tokens}" if self.cut else ""
        names = ", ".join(self.names)
        yield f"texts        {names}: {least} to {most} tokens, mean {mean:.1f}{cut}"
        if self.padding:
            random, grouped = self.padding
            more = f", {random:.1%} in random order"
            if not self.is_grouped:
                more = f", {grouped:.1%} by dataset.group_by_length=true" if random > 0.1 else ""
            shown = grouped if self.is_grouped else random
            yield f"padding      {shown:.1%} of all tokens{more}"


def _summed(text: tuple[Any, Iterable[tuple[Any, int, float]]]) -> tuple[Any, int, float]:
    about, (_, tokens, losses) = text[0], zip(*text[1], strict=True)
    return about, sum(tokens), math.fsum(losses)
