"""YAML by libyaml, which PyYAML brings along: OmegaConf asks for what is written in Python, ten
times as slow.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import omegaconf
import yaml
from omegaconf import OmegaConf


@contextlib.contextmanager
def parsed_by_libyaml() -> Iterator[None]:
    """While entered, OmegaConf reads files so; what libyaml refuses is read once more, for a
    message as ever.

    It takes an eighth off the 0.1 s in which Hydra composes a run, and half off the time to read
    all that expt ships."""
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


def plain(path: Path) -> Any:
    """What a file that expt ships holds: for its keys, in a fifth of the time that OmegaConf takes."""
    return yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@contextlib.contextmanager
def written_by_libyaml() -> Iterator[None]:
    """While entered, Hydra writes a run's `.hydra` so: it takes 15 ms off a driver's time."""
    from hydra.core import utils  # late: who lists settings has no need of Hydra

    real = getattr(utils, "_save_config", None)
    if real is None:  # another Hydra
        yield
        return

    def _save_config(cfg: object, filename: str, output_dir: Path) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / filename).write_text(as_yaml(cfg), encoding="utf-8")

    utils._save_config = _save_config
    try:
        yield
    finally:
        utils._save_config = real


def as_yaml(config: object) -> str:
    """What OmegaConf.to_yaml gives; by libyaml where that is there, in a fifth of the time."""
    if (dumper := _fast_dumper()) is not None:
        settings = OmegaConf.to_container(config, enum_to_str=True)
        text: str = yaml.dump(
            settings, default_flow_style=False, allow_unicode=True, sort_keys=False, Dumper=dumper
        )
        if not _WRITTEN_OTHERWISE.search(text):
            return text
    return OmegaConf.to_yaml(config)


_WRITTEN_OTHERWISE = re.compile(r"\\[UNLP]|^[\s?:-]*'':", re.MULTILINE)
"""What libyaml writes for rare characters and an empty key, where PyYAML's own way is another."""


@functools.cache
def _fast_dumper() -> Any:
    try:
        from omegaconf._utils import get_omega_conf_dumper

        text = get_omega_conf_dumper().yaml_representers[
            str
        ]  # which quotes what looks like a number
        dumper: Any = type("FastDumper", (yaml.CDumper,), {})
    except (ImportError, AttributeError, KeyError):  # no libyaml, or another version
        return None
    dumper.add_representer(str, text)
    return dumper
