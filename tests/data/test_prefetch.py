"""Batches of a side stream, on streams that only write down what they were told: no GPU is at
hand."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from expt.data import loading
from expt.data.loading import prefetched
from tests.facade import Patch

GPU = torch.device("cuda", 0)


class Streams:
    """The streams by their names, and in which order who was told what."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.current = self.named("main")

    def named(self, name: str) -> Any:
        def wait(other: Any) -> None:
            self.told.append(f"{name} waits for {other.name}")

        return SimpleNamespace(name=name, wait_stream=wait)

    @contextlib.contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def streams(monkeypatch: Patch) -> Iterator[Streams]:
    found = Streams()
    loading._side_stream.cache_clear()
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: found.named("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: found.current)
    monkeypatch.setattr(torch.cuda, "stream", found.entered)
    monkeypatch.setattr(
        Tensor,
        "record_stream",
        lambda self, stream: found.told.append(f"{int(self)} is used by {stream.name}"),
    )
    yield found
    loading._side_stream.cache_clear()


def made(streams: Streams, count: int) -> Iterator[tuple[Any, Any, str]]:
    for number in range(count):
        streams.told.append(f"{number} is made on {streams.current.name}")
        yield {"image": torch.tensor(number)}, torch.tensor(10 + number), "no tensor"


def test_a_batch_is_made_aside_and_waited_for_by_its_user_alone(streams: Streams) -> None:
    for batch in prefetched(made(streams, 2), GPU):
        streams.told.append(f"{int(batch[1]) - 10} is taken on {streams.current.name}")
    assert streams.told == [
        "side waits for main", "0 is made on side", "main waits for side", "0 is used by main",
        "10 is used by main", "0 is taken on main", "1 is made on side", "main waits for side",
        "1 is used by main", "11 is used by main", "1 is taken on main",
    ]  # fmt: skip


def test_whoever_asks_on_another_stream_is_the_one_that_waits(streams: Streams) -> None:
    batches = prefetched(made(streams, 1), GPU)
    with streams.entered(streams.named("other")):
        next(batches)
    assert streams.told[2:] == ["other waits for side", "0 is used by other", "10 is used by other"]


def test_on_a_cpu_there_is_no_stream(streams: Streams) -> None:
    assert len(list(prefetched(made(streams, 2), torch.device("cpu")))) == 2
    assert streams.told == ["0 is made on main", "1 is made on main"]
