"""Models of transformers, and adapters of peft, which are imported where such a model is chosen."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from expt.config import secrets
from expt.config.groups import HuggingFaceModel
from expt.errors import ConfigError, did_you_mean, listed
from expt.features import Anything, Classes, Features, Labels, Numbers, Text
from expt.models import published_files

_PROBLEMS = {
    Classes: "single_label_classification",
    Labels: "multi_label_classification",
    Numbers: "regression",
}
"""The names that transformers has for tasks of a sample."""
_FEW = 4  # tokens that show whether a model sees later ones


class HuggingFace(nn.Module):
    """A model of transformers that is called with the inputs of a batch, and returns logits.

    The inputs are a mapping of keywords, or tokens [B, T]. Outputs without logits stay as they are.
    """

    def __init__(
        self, model: Any, base: Mapping[str, Any], drawn: Collection[str], fixed: Collection[str]
    ) -> None:
        super().__init__()
        self.model = model
        self.base = base
        """The record of the published model; see published_files.described."""
        self.drawn = sorted(drawn)
        """The names of weights that its files lack."""
        self.notes = list[str]()
        """Reasons why it is trained otherwise than by Trainer, or on other workers."""
        self.fixed = tuple(f"model.{name}" for name in fixed)
        """The names of weights that stay as published, which `state_dict` leaves out."""
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        keywords = inspect.signature(inner.forward).parameters
        self._options = {"use_cache": False} if "use_cache" in keywords else {}
        self.register_state_dict_post_hook(_leave_out)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_put_in)  # type: ignore[no-untyped-call]

    def forward(self, inputs: Any) -> Any:
        """Return the logits."""
        given = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
        found = self.model(**given, **self._options)
        logits = getattr(found, "logits", None)
        return found if logits is None else logits


def _leave_out(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in module.fixed:
        state.pop(prefix + name, None)


def _put_in(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if module.fixed:
        named = dict(module.named_parameters(remove_duplicate=False))
        for name in module.fixed:
            state.setdefault(prefix + name, named[name].detach())


def build(
    config: HuggingFaceModel,
    features: Features,
    example: Any,
    *,
    fetch: bool,
    base: Mapping[str, Any] | None,
) -> HuggingFace:
    """Return the model for data of these `features`.

    New weights are drawn from torch's global generator; without `fetch` all are. `base` is the
    record of the published model where its folder may be gone. Raise ConfigError for models and
    inputs that do not go together.
    """
    is_tokens = isinstance(example, Tensor) and not example.is_floating_point()
    if example is not None and not is_tokens and not isinstance(example, Mapping):
        raise ConfigError(
            "model=transformers: takes texts, as tokens or as keywords such as input_ids, and the"
            " dataset gives others; name its column of texts by dataset.text"
        )
    try:
        with quiet():
            base = base or published_files.described(config)
            own = _configuration(config, features, base, is_new=fetch)
            model, drawn = _built(config, own, features, fetch=fetch)
            fixed: list[str] = []
            if config.lora.rank:
                begun = config.pretrained and fetch
                loaded = {one for x, one in _named(model).items() if begun and x not in drawn}
                model = _with_adapters(config, model, features, drawn)
                still = [(x, one) for x, one in _named(model).items() if not one.requires_grad]
                # as they were loaded, and heads that adapters hide
                fixed = [x for x, one in still if one in loaded or ".original_module." in x]
            module = HuggingFace(model.train(), base, drawn, fixed)
            if fetch and torch.get_default_device().type != "meta":
                _try(config, module, own, features, example)
    except ConfigError:
        raise
    except Exception as error:  # many classes, of several libraries
        raise ConfigError(
            f"model.path={config.path}: can't be built ({secrets.said(error)}); give a model of"
            " text, whose architecture this version of transformers has"
        ) from error
    return module


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _configuration(config: HuggingFaceModel, features: Features, base: Any, *, is_new: bool) -> Any:
    """Return the model's own configuration, for these features."""
    transformers: Any = importlib.import_module("transformers")
    kind, targets = base["config"].get("model_type"), features.targets
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"model.path={config.path}: its model_type is {kind}, which this version of"
            " transformers does not have; give another, or update transformers"
        )
    own = transformers.CONFIG_MAPPING[kind].from_dict(dict(base["config"]))
    changed = config.config or {}
    if unknown := [key for key in changed if not hasattr(own, key)]:
        hint = did_you_mean(unknown[0], own.to_dict())
        raise ConfigError(f"model.config.{unknown[0]}: {kind} has no such entry.{hint}")
    own.update(changed)
    given = {key: getattr(own, key) for key in changed}
    own.dtype = "float32"
    vocabulary, known = features.shapes.get("vocab_size", 0), getattr(own, "vocab_size", None)
    if known is not None and vocabulary > known:
        raise ConfigError(
            f"model.path={config.path}: knows {known:,} tokens, and the tokenizer has"
            f" {vocabulary:,}; use the model's own tokenizer"
        )
    if (problem := _PROBLEMS.get(type(targets))) is not None:
        number = features.targets.shapes["num_classes"]
        are_named = len(targets.names) == number
        names = targets.names if are_named else [f"LABEL_{place}" for place in range(number)]
        own.num_labels, own.problem_type = number, problem
        own.id2label, own.label2id = dict(enumerate(names)), {x: i for i, x in enumerate(names)}
        if (pad := getattr(features.inputs, "pad_id", own.pad_token_id)) is None:
            ends = own.eos_token_id  # by which decoders find the last token of a text
            pad = ends[0] if isinstance(ends, list | tuple) else ends
        own.pad_token_id = pad
    for key, value in given.items():
        set_to = getattr(own, key)
        if is_new and _json(set_to) != _json(value):
            raise ConfigError(f"model.config.{key}={value}: expt sets {set_to}; leave it out")
    return own


def _json(value: Any) -> str:
    return json.dumps(value, default=str)  # in which 0 and "0" are one key


def _built(
    config: HuggingFaceModel, own: Any, features: Features, *, fetch: bool
) -> tuple[Any, set[str]]:
    """Return the model of the own configuration, and the names of weights its files lack."""
    auto = _class_of(own, features)
    if not (config.pretrained and fetch):
        return _new(auto, own), set()
    if torch.get_default_device().type == "meta":
        if config.needs_base:  # which each worker loads
            raise RuntimeError("published weights are no meta tensors")
        return _new(auto, own), set()
    model, found = auto.from_pretrained(
        published_files.folder_of(config),
        config=own,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        local_files_only=True,
    )
    return model, {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}


def _new(cls: Any, own: Any) -> Any:
    return cls.from_config(own, dtype=torch.float32) if hasattr(cls, "from_config") else cls(own)


def _class_of(own: Any, features: Features) -> Any:
    """Return the class for the targets; for those of a custom task the configuration's own."""
    transformers: Any = importlib.import_module("transformers")
    if type(features.targets) in _PROBLEMS:
        return transformers.AutoModelForSequenceClassification
    if not isinstance(features.targets, Anything):
        return transformers.AutoModelForCausalLM
    names = [name for name in own.architectures or () if hasattr(transformers, name)]
    return getattr(transformers, names[0]) if names else transformers.AutoModel


def _with_adapters(
    config: HuggingFaceModel, model: Any, features: Features, drawn: Collection[str]
) -> Any:
    """Return the model with adapters of peft.

    Layers above its body are trained too, unless they are the embeddings, and those whose weights
    were drawn, which others that load the adapters would draw again.
    """
    peft: Any = importlib.import_module("peft")
    targets, lora = config.lora.targets, config.lora
    is_of_samples, body = type(features.targets) in _PROBLEMS, model.base_model_prefix
    has_head = hasattr(model, body) and model.get_output_embeddings() is None
    tops = model.named_children() if is_of_samples or has_head else ()
    whole = [name for name, part in tops if name != body and _named(part)]
    layers = sorted({name.rpartition(".")[0] for name in drawn})
    whole += [name for name in layers if name.partition(".")[0] not in whole]
    kind = "SEQ_CLS" if is_of_samples else "CAUSAL_LM" if model.can_generate() else None
    settings = peft.LoraConfig(
        task_type=kind,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=[*targets] if isinstance(targets, tuple) else targets,
        modules_to_save=whole or None,
    )
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(
            f"model.lora.targets={'null' if targets is None else listed(settings.target_modules)}:"
            f" {secrets.said(error)}; name layers of the model, or use all-linear"
        ) from error


@torch.no_grad()
def _try(
    config: HuggingFaceModel, module: HuggingFace, own: Any, features: Features, example: Any
) -> None:
    """Refuse foresight and texts that are too long; note other losses, and outputs by padding."""
    module.eval()
    if features.targets.each == "token" and (size := min(own.vocab_size, _FEW + 1)) > 1:
        ids = torch.arange(_FEW)[None] % size
        other = (ids + functional.one_hot(torch.tensor(_FEW - 1), _FEW)) % size  # in its last
        if not torch.allclose(module(ids)[:, :-1], module(other)[:, :-1], atol=1e-4):
            raise ConfigError(
                f"model.path={config.path}: predicts a token from those after it, too; give a"
                " causal model, such as GPT-2 or Llama, or model.config={is_decoder: true} where it"
                " has that"
            )
        with contextlib.suppress(Exception):  # not all take labels
            loss = functional.cross_entropy(module(ids)[0, :-1], ids[0, 1:])
            if not torch.allclose(module.model(input_ids=ids, labels=ids).loss, loss, rtol=1e-4):
                what = "next tokens, such as with a router's part; expt trains by the cross-entropy"
                module.notes.append(f"its own loss is other than the cross-entropy of the {what}")
    named = module.base["config"].get("id2label") or {}
    theirs = [str(named[number]) for number in sorted(named, key=int)]
    ours = [*features.targets.names]
    if config.pretrained and theirs != ours and sorted(theirs) == sorted(ours):
        module.notes.append(f"its head has other places for the classes: {listed(theirs)}")
    if isinstance(example, Mapping):
        _refuse_length(config, module, own, example)
    if isinstance(example, Mapping) and isinstance(text := features.inputs, Text):
        few = {name: one[:, -_FEW:] for name, one in example.items()}
        pads = {"input_ids": text.pad_id, "token_type_ids": text.pad_type or 0}
        where = (_FEW, 0) if text.pads_left else (0, _FEW)
        more = {x: functional.pad(one, where, value=pads.get(x, 0)) for x, one in few.items()}
        with contextlib.suppress(Exception):  # some need more tokens
            alone, padded = (module(each) for each in (few, more))
            shown = padded[:, :_FEW] if features.targets.each == "token" else padded
            if (alone - shown).abs().max() > 1e-3 * alone.abs().max():
                what = "training and evaluations depend on the number of workers"
                module.notes.append(f"its outputs depend on a batch's padding, so that {what}")
    module.train()


def _refuse_length(
    config: HuggingFaceModel, module: HuggingFace, own: Any, example: Mapping[str, Tensor]
) -> None:
    """Raise ConfigError where the longest text, as the `example`, has more tokens than it takes."""
    limit, longest = getattr(own, "max_position_embeddings", None), example["input_ids"].shape[1]
    if not limit or longest <= limit - _FEW:  # of its positions RoBERTa takes two fewer
        return
    try:
        module(example)  # rotary positions have no end
    except (IndexError, RuntimeError) as error:
        raise ConfigError(
            f"model.path={config.path}: has {limit:,} positions, too few for the longest"
            f" text of {longest:,} tokens; use a smaller dataset.max_tokens"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the bars and logs of transformers: expt says which weights are drawn."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()
