"""A run's model as a folder for transformers or peft, which is compared before it is there."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import torch

from expt import progress
from expt.config.parse import recorded
from expt.data.loading import leaves
from expt.errors import ConfigError, RunFailed
from expt.inference.export import compared
from expt.inference.load import located, read, rebuilt
from expt.inference.writing import new_folder
from expt.models.hugging_face import HuggingFace, quiet
from expt.runs.paths import RunPaths

_TEXTS, _TOKENS = 8, 12
"""The sizes of the random batch by which the folder is checked."""


@progress.phase("exporting")
def export(
    run: Path,
    folder: Path,
    *,
    which: str = "best",
    adapters: bool = False,
    tolerance: float = 1e-4,
) -> dict[str, str]:
    """Write the model of a run to a folder, with its tokenizer and classes; describe it.

    Adapters are merged into the weights, or with `adapters` written alone, for peft. The folder is
    there only if the model that is loaded from it gives equal outputs, to `tolerance`. Raise
    ConfigError for other models, RunFailed where the check fails.
    """
    record, path = located(run, which)
    state = read(path)
    module = rebuilt(record, state, torch.device("cpu"), plain=True).model
    model = recorded(state["config"]).model
    if not isinstance(module, HuggingFace):
        raise ConfigError(
            f"--format huggingface: the run's model is model={model.name}; use torch_export or onnx"
        )
    has_adapters = hasattr(module.model, "merge_and_unload")
    if adapters and not has_adapters:
        raise ConfigError("--adapters: the run trained all weights; leave it out")
    inputs = _random_inputs(module)
    with torch.no_grad(), quiet(), new_folder(folder) as beside:
        wanted = module(inputs)
        if adapters:
            _name_base(module, model)
        if (
            tokenizer := RunPaths(run).tokenizer
        ).is_dir():  # with a configuration, which is not kept
            shutil.copytree(tokenizer, beside, dirs_exist_ok=True)
        _save(module, beside, merge=has_adapters and not adapters)
        other = _loaded(module, beside, adapters=adapters)
        allowed, difference = compared(
            lambda *_: wanted, lambda part: [*leaves(other(*part))], [(inputs,)], tolerance
        )
        if not difference <= allowed:  # nan too
            is_merged = has_adapters and not adapters  # of tied weights it changes both
            fix = "--adapters leaves them apart" if is_merged else "--tolerance allows more"
            raise RunFailed(
                f"{folder}: is not written: its outputs differ from the model's by up to"
                f" {difference:.2g}, and {allowed:.1g} is allowed; {fix}"
            )
    class_name = type(_body(module)).__name__
    by = f"peft, and {class_name}" if adapters else f"{class_name}.from_pretrained"
    return {
        "loaded by": by,
        "weights": f"of epoch {state['position']['epoch']}, the {which}",
        "difference": f"at most {difference:.2g}, and {allowed:.2g} is allowed",
    }


def _body(module: HuggingFace) -> Any:
    model = module.model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _random_inputs(module: HuggingFace) -> dict[str, torch.Tensor]:
    body = _body(module)
    own, known = body.config.get_text_config(), len(body.get_input_embeddings().weight)
    size = min(_TOKENS, getattr(own, "max_position_embeddings", None) or _TOKENS)
    ids = torch.randint(known, (_TEXTS, size), generator=torch.Generator().manual_seed(0))
    if isinstance(end := own.eos_token_id, int):  # which T5 and BART look for in each text
        ids[ids == end] = (end + 1) % known
        ids[:, -1] = end
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _name_base(module: HuggingFace, config: Any) -> None:
    """Have the adapters name the published model by its place, or its name and commit."""
    (settings,) = module.model.peft_config.values()
    commit = module.base.get("commit")
    settings.base_model_name_or_path = config.path if commit else module.base["folder"]
    settings.revision = commit


def _save(module: HuggingFace, folder: Path, *, merge: bool) -> None:
    transformers: Any = importlib.import_module("transformers")
    body, model = _body(module), module.model
    if "generation" in module.base and body.can_generate():
        body.generation_config = transformers.GenerationConfig.from_dict(module.base["generation"])
    if merge:
        model = model.merge_and_unload()
    model.save_pretrained(folder)
    body.config.save_pretrained(folder)


def _loaded(module: HuggingFace, folder: Path, *, adapters: bool) -> HuggingFace:
    """Return the model that others load from the folder."""
    kind, own = type(_body(module)), _body(module).config
    if not adapters:
        model = kind.from_pretrained(folder, dtype=torch.float32)
    else:
        peft: Any = importlib.import_module("peft")
        whole = kind.from_pretrained(
            module.base["folder"], config=own, dtype=torch.float32, ignore_mismatched_sizes=True
        )
        model = peft.PeftModel.from_pretrained(whole, folder)
    return HuggingFace(model.eval(), module.base, (), ())
