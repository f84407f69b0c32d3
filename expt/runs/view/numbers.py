"""The numbers of a line about a run: which of its tags are shown, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from expt.runs import tags


def is_running(tag: str) -> bool:
    """Whether it is of what was trained on since the last log point."""
    return tag.startswith(tags.running("")) or tag == tags.RUNNING_SAMPLES_PER_S


def speed_label(noun: str) -> str:
    """Of the samples that are trained on in a second, each of which is called so."""
    return "img/s" if noun == "image" else f"{noun}s/s"


def _shown(values: Mapping[str, float], noun: str) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Of each number its tags, the first that there is counts, its label and its format."""
    trained = (tag.removesuffix("/train") for tag in values if tag.endswith("/train"))
    names = [
        *trained,
        *(tag.removeprefix(tags.running("")) for tag in values if tag.startswith(tags.running(""))),
    ]
    metric = next((name for name in names if name != "loss"), "loss")
    yield (tags.metric("loss", "train"), tags.RUNNING_LOSS), "loss", ".4f"
    if metric != "loss":
        yield (
            (tags.metric(metric, "train"), tags.running(metric)),
            _ABBREVIATED.get(metric, metric),
            ".4f",
        )
    yield (tags.metric(metric, "val"),), "val", ".4f"
    yield (tags.metric(metric, "test"),), "test", ".4f"
    yield (tags.SAMPLES_PER_S, tags.RUNNING_SAMPLES_PER_S), speed_label(noun), ",.0f"


_ABBREVIATED = {"accuracy": "acc"}


def in_words(values: Mapping[str, float], noun: str = "image") -> dict[str, str]:
    """Each number with its label, by label; the epoch's own where it has ended, else since the last
    log point.

    A sample is called `noun`.
    """
    shown = list(_shown(values, noun))
    found = {
        label: next((values[tag] for tag in either if tag in values), None)
        for either, label, _ in shown
    }
    return {
        label: f"{label} {found[label]:{form}}"
        for _, label, form in shown
        if found[label] is not None
    }
