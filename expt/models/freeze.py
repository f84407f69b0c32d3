"""Parameters that are not trained."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from expt.errors import ConfigError, did_you_mean


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Let no gradient reach the parameters in whose name one of the regular expressions is found.

    Their batch norms follow the images all the same. Raises ConfigError for one that is found
    nowhere, and where nothing is left to train."""
    parameters = dict(module.named_parameters())
    for pattern in patterns:
        found = [name for name in parameters if re.search(pattern, name)]
        if not found:
            raise ConfigError(
                f"freeze={pattern}: is in no parameter's name.{_hint(pattern, list(parameters))}"
            )
        for name in found:
            parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            f"freeze=[{','.join(patterns)}]: leaves no parameter to train; freeze fewer"
        )


def _hint(pattern: str, names: Sequence[str]) -> str:
    """The nearest name of a parameter or of a layer; else some of those that there are."""
    layers = {
        ".".join(name.split(".")[:depth])
        for name in names
        for depth in range(1, name.count(".") + 1)
    }
    some = f" There are {len(names)}, such as {', '.join([*names[:3], *names[-1:]])}."
    return did_you_mean(pattern.strip("^$.*"), [*names, *layers]) or some
