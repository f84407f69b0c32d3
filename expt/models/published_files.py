"""The files of a published model of transformers: a folder, or a name on the Hugging Face hub.

Free of torch and transformers.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

from expt.config import secrets
from expt.config.groups import HuggingFaceModel
from expt.errors import ConfigError, absent, require
from expt.machine import impatient

CONFIG, GENERATION = "config.json", "generation_config.json"
_WEIGHTS = ("model*.safetensors*", "pytorch_model*.bin*")
"""The files of weights and their index; of two kinds transformers takes the first."""
_OTHERS = ("*.json", "*.txt", "*.model", "*.jinja")
"""Other files of a name that are fetched: those of the configuration and the tokenizer."""


def folder_of(config: HuggingFaceModel) -> Path:
    """Return the folder of a published model; one of the hub is fetched unless it is there.

    Raise ConfigError where there is none, or packages are missing.
    """
    packages = ("transformers", "peft") if config.lora.rank else ("transformers",)
    require(f"model={config.name}", *packages, extra="transformers")
    folder = Path(config.path).expanduser()
    at = f"model.path={config.path}"
    if folder.is_dir() and config.revision:
        raise ConfigError(f"model.revision={config.revision}: {at} is a folder; leave it out")
    if not folder.is_dir() and is_name(config.path):
        named = at, config.path, config.revision
        folder = fetched(*named, *_OTHERS, *(_WEIGHTS[:1] if config.pretrained else ()))
        if config.pretrained and not _weights_in(folder):
            folder = fetched(*named, *_OTHERS, _WEIGHTS[1])
    if not (folder / CONFIG).is_file():
        fix = "give one that save_pretrained has written, or a name on the Hugging Face hub"
        has_none = f"has no {CONFIG}; {fix}" if folder.is_dir() else absent(folder, "folder", fix)
        raise ConfigError(f"model.path={config.path}: {has_none}")
    if config.pretrained and not _weights_in(folder):
        raise ConfigError(
            f"model.path={config.path}: holds no weights ({' or '.join(_WEIGHTS)}); give another,"
            " or model.pretrained=false"
        )
    return folder


def _weights_in(folder: Path) -> list[Path]:
    found = (sorted(folder.glob(pattern)) for pattern in _WEIGHTS)
    return next(filter(None, found), [])


def is_name(path: str) -> bool:
    """Return whether it can be a name on the hub."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) is not None


def fetched(at: str, name: str, revision: str | None, *patterns: str) -> Path:
    """Return the folder of a name on the hub, whose files lie in its cache, or are fetched.

    Raise ConfigError where they can't be, which begins with `at`.
    """
    hub: Any = importlib.import_module("huggingface_hub")  # which comes with transformers
    importlib.import_module("huggingface_hub.utils").disable_progress_bars()
    try:
        with impatient():
            found = hub.snapshot_download(name, revision=revision, allow_patterns=[*patterns])
    except Exception as error:  # many classes, of several libraries
        why = f"nor can it be fetched from the Hugging Face hub ({secrets.said(error)})"
        fix = f"{why}; give one that save_pretrained has written"
        raise ConfigError(f"{at}: {absent(Path(name), 'folder', fix)}") from error
    return Path(found)


def counted(config: HuggingFaceModel) -> list[Path]:
    """Return the files that a run's numbers depend on; its weights if the run begins from them.

    Raise ConfigError as `folder_of` does.
    """
    folder = folder_of(config)
    return [folder / CONFIG, *(_weights_in(folder) if config.pretrained else [])]


def described(config: HuggingFaceModel) -> dict[str, Any]:
    """Return the configurations of a published model, and its place, for the record of a run."""
    folder = folder_of(config)
    found: dict[str, Any] = {"folder": str(folder.absolute())}
    if folder.parent.name == "snapshots":  # of the hub's cache
        found["commit"] = folder.name
    for key, name in (("config", CONFIG), ("generation", GENERATION)):
        try:
            found[key] = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise ConfigError(
                f"model.path={config.path}: {name} is no JSON ({error}); fix it"
            ) from error
    return found
