"""Pictures with numbers to predict, or labels of 0 and 1, that are read one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from expt.data import samples
from expt.data.loading import Finish, Load, Loader, LoaderOptions
from expt.data.pictures import Pictures
from expt.data.source import Part, Source
from expt.data.stream import SampleLoader
from expt.data.transforms import Transformed

Scales = Mapping[str, Sequence[float]]
"""By the name of a target its mean and deviation, which it is given in units of."""


def of_numbers(
    made: Callable[[Callable[[Tensor], Tensor]], Mapping[str, Pictures]],
    targets: Tensor,
    names: Sequence[str],
    num_workers: int,
    *,
    scales: Scales | None = None,
    standardises: bool = False,
) -> Source:
    """The parts `train`, and `val` and `test` if there are, that `made` makes with what scales a
    target float32 [T].

    `targets` float32 [N, T] are those of train. They are in units of `scales`; or, where the source
    `standardises`, of what the training samples give, once these are chosen."""

    def found(by: Scales, **more: object) -> Source:
        return _source(
            made(_scaling(by, names)), _scaling(by, names)(targets), names, num_workers, **more
        )

    def fitted(chosen: Tensor) -> Source:
        values = targets[chosen].double()
        mean, std = values.mean(0), values.std(0, correction=0)
        std = torch.where(
            std > 1e-12 * values.abs().amax(0), std, torch.ones_like(std)
        )  # else all are alike
        by = dict(zip(names, zip(mean.tolist(), std.tolist(), strict=True), strict=True))
        return found(by, standardised=by)

    if scales is not None:
        return found(scales)
    return found({}, fitted=fitted) if standardises else found({})


def _scaling(by: Scales, names: Sequence[str]) -> Callable[[Tensor], Tensor]:
    if not by:
        return lambda target: target
    mean, std = torch.tensor(
        [tuple(by.get(name, (0.0, 1.0))) for name in names], dtype=torch.float64
    ).T
    return lambda target: ((target.double() - mean) / std).float()


def _source(
    sets: Mapping[str, Pictures],
    targets: Tensor,
    names: Sequence[str],
    num_workers: int,
    **more: object,
) -> Source:
    channels, height, width = sets["train"][0][0].shape
    for each in sets.values():
        each.one_size = height, width
    shape = channels, height, width
    parts = {
        part: Part(len(each), _loading(each, shape, num_workers)) for part, each in sets.items()
    }
    shapes = {"channels": channels, "image_size": (height, width), "num_classes": targets.shape[1]}
    example, alike = (torch.zeros(shape), torch.zeros(targets.shape[1])), torch.zeros(len(targets))
    more |= {"val": parts.get("val"), "normalises": True, "target_names": tuple(names)}
    more |= {"targets_of": targets.__getitem__}
    return Source(shapes, (), example, parts["train"], parts.get("test"), alike, **more)  # type: ignore[arg-type]


def _loading(pictures: Pictures, shape: tuple[int, int, int], num_workers: int) -> Load:
    def load(indices: Tensor, options: LoaderOptions) -> Loader:
        chosen = (
            Transformed(pictures.as_they_lie(), options.transforms, shape)
            if options.transforms
            else pictures
        )
        finish = Finish(options, channels=shape[0])
        return SampleLoader(
            chosen,
            indices,
            options,
            collate=samples.collated,
            num_workers=num_workers,
            finish=finish,
        )

    return load
