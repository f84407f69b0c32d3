"""Which parameters each phase of a step trains."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from expt.errors import ConfigError, did_you_mean

Phases = Mapping[str, frozenset[nn.Parameter]]


def parameters_of(phases: Mapping[str, str], module: nn.Module) -> Phases:
    """The parameters of each phase, which a regular expression finds by name.

    Raises ConfigError for one that finds nothing, and for a parameter that is trained in no phase.
    """
    named = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    found: dict[str, frozenset[nn.Parameter]] = {}
    for phase, pattern in phases.items():
        try:
            names = [name for name in named if re.search(pattern, name)]
        except re.error as error:
            raise ConfigError(
                f"phases: {phase}: {pattern!r} is no regular expression: {error}"
            ) from error
        if not names:
            hint = did_you_mean(pattern.strip("^$.*"), {name.partition(".")[0] for name in named})
            raise ConfigError(
                f"phases: {phase}: {pattern!r} is in no trained parameter's name.{hint}"
            )
        found[phase] = frozenset(named[name] for name in names)
    left = [
        name
        for name, parameter in named.items()
        if not any(parameter in own for own in found.values())
    ]
    if left and phases:
        raise ConfigError(
            f"phases: no phase trains {', '.join(left[:3])}; let one find it, or freeze it"
        )
    return found


@contextlib.contextmanager
def only(trained: frozenset[nn.Parameter], all_trained: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within it no gradient reaches another parameter than the `trained`."""
    others = [parameter for parameter in all_trained if parameter not in trained]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
