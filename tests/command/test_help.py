"""`--help`, whose text comes from the YAML itself."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from expt.command.conf_files import conf_dir
from expt.command.help import EXAMPLES, print_help
from tests.conftest import run


def help_text(config_dir: str | None = None) -> str:
    out = StringIO()
    print_help(Console(file=out, width=200), config_dir)
    return out.getvalue()


def keys() -> Iterator[str]:
    content = OmegaConf.load(conf_dir() / "config.yaml")
    assert isinstance(content, DictConfig)
    for key, value in content.items():
        if isinstance(value, DictConfig) and key != "hydra":
            yield from (".".join((str(key), str(below))) for below in value)
        elif key not in ("defaults", "hydra"):
            yield str(key)


def test_help_shows_every_key_and_group(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path, COLUMNS="200")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.strip() for line in done.stdout.splitlines()]
    for key in keys():
        assert any(line.startswith(f"{key}=") and len(line.split()) > 2 for line in lines), key
    for folder in {path.parent for path in conf_dir().glob("*/*.yaml")}:
        options = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        assert [folder.name, options] in [line.split(maxsplit=1) for line in lines]
    assert not any(tmp_path.iterdir())


def test_three_examples_come_first() -> None:
    assert len(EXAMPLES) >= 3
    text = help_text()
    assert all(text.index(command) < text.index("Groups") for command, _ in EXAMPLES)


def test_a_key_is_shown_with_its_value_and_meaning() -> None:
    lines = [" ".join(line.split()) for line in help_text().splitlines()]
    assert "batch_size=64 images per optimiser step over all workers (global), or '32 per worker'" in lines
    assert "ddp.sync_batchnorm=false batch statistics over all workers (GPUs only)" in lines
    assert not any("hydra." in line for line in lines)


@pytest.mark.parametrize("group", ["model", "extra"])
def test_a_folder_of_ones_own_is_listed(tmp_path: Path, group: str) -> None:
    (tmp_path / group).mkdir()
    (tmp_path / group / "transformer.yaml").write_text("_target_: mine.Transformer\n")
    (line,) = (line for line in help_text(str(tmp_path)).splitlines() if "transformer" in line)
    assert line.split()[0] == group
