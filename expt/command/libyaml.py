"""YAML by libyaml's parser, which PyYAML brings along: OmegaConf asks for the one in Python, ten times as slow."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import omegaconf
import yaml


@contextlib.contextmanager
def parsed_by_libyaml() -> Iterator[None]:
    """While entered, OmegaConf reads files so; what libyaml refuses is read once more, for a message as ever.

    It takes an eighth off the 0.1 s in which Hydra composes a run, and half off the time to read all that expt ships.
    """
    utilities: Any = getattr(omegaconf, "_utils", None)
    real: Callable[[], Any] | None = getattr(utilities, "get_yaml_loader", None)
    if real is None or not yaml.__with_libyaml__:  # another OmegaConf, or a PyYAML built without it
        yield
        return
    utilities.get_yaml_loader = lambda: _loader(real)
    try:
        yield
    finally:
        utilities.get_yaml_loader = real


@functools.cache
def _loader(real: Callable[[], Any]) -> type[Any]:
    slow: Any = real()
    parser: Any = yaml.cyaml.CParser  # type: ignore[attr-defined]

    class Fast(parser, slow):  # type: ignore[misc]
        def __init__(self, stream: Any) -> None:
            parser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    class Loader:
        """What yaml.load makes of a stream, and asks once."""

        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def get_single_data(self) -> Any:
            try:
                return Fast(self._stream).get_single_data()
            except yaml.YAMLError:
                self._stream.seek(0)
                return slow(self._stream).get_single_data()

        def dispose(self) -> None:
            """Nothing is kept."""

    return Loader
