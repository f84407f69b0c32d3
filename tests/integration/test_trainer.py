"""Fine-tuning has the losses of Hugging Face's Trainer in each step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, SequentialSampler

from expt.config import groups
from expt.features import Anything, Classes, Feature, Features
from expt.models.build import build
from expt.training import random_state
from tests.conftest import Trained
from tests.facade import as_typed
from tests.models.test_hugging_face import library, save

Sample = tuple[Tensor, Tensor]
NAME = f"{__name__}.Texts"
RATE, DECAY, WARM = 1e-2, 0.1, 3
COMMON = as_typed(
    f"model=transformers batch_size=8 epochs=2 optimizer=adamw optimizer.lr={RATE} world_size=2"
    f" optimizer.weight_decay={DECAY} optimizer.decay_biases_and_norms=false scheduler=linear"
    f" scheduler.warmup_steps={WARM} log_every=1 drop_last=false eval_split=test"
    " objective=loss/test tensorboard.images=false"
)
CASES = {
    "a classifier": ("BertForMaskedLM", "classification", None),
    "a causal model": ("LlamaForCausalLM", "language_model", None),
    "adapters": ("BertForMaskedLM", "classification", 4),
}


class Texts(Dataset[Sample]):
    """Random tokens; classes, or the tokens that follow all but the first two."""

    def __init__(self, train: bool, task: str) -> None:
        self.task = task
        drawn = torch.Generator().manual_seed(int(train))
        lengths = torch.randint(4, 20, (45,), generator=drawn).tolist()
        self.texts = [torch.randint(3, 64, (length,), generator=drawn) for length in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Sample:
        text = self.texts[index]
        if self.task == "classification":
            return text, text[0] % 3
        return text, torch.cat([torch.tensor([-100]), text[2:], torch.tensor([-100])])

    def collate(self, samples: list[Sample]) -> tuple[dict[str, Tensor], Tensor]:
        texts, targets = zip(*samples, strict=True)
        masks = [torch.ones_like(text) for text in texts]
        padded = {"input_ids": texts, "attention_mask": masks}
        inputs = {key: pad_sequence([*each], batch_first=True) for key, each in padded.items()}
        if self.task == "classification":
            return inputs, torch.tensor([*map(int, targets)])  # expt counts classes
        return inputs, pad_sequence([*targets], batch_first=True, padding_value=-100)


def losses_of_trainer(folder: Path, task: str, rank: int | None, out: Path) -> list[float]:
    """Train what expt builds by Trainer, on the same batches."""
    transformers, data = library(), Texts(True, task)
    targets: Feature = Anything() if task == "language_model" else Classes(names=tuple("012"))
    config = groups.HuggingFaceModel(
        name="transformers",
        path=str(folder),
        config={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        if task == "classification"
        else None,
        lora=groups.Lora(rank=rank),
    )
    random_state.seed(0)
    features, init = Features(Anything(), targets), groups.DefaultInit(name="default")
    module: Any = build(config, init, features, None)

    def collate(samples: list[Sample]) -> dict[str, Tensor]:
        inputs, labels = data.collate(samples)
        if task == "language_model":  # which Trainer's models shift themselves
            labels = torch.cat([torch.full((len(labels), 1), -100), labels[:, :-1]], 1)
        return {**inputs, "labels": labels}

    class InOrder(transformers.Trainer):  # type: ignore[name-defined,misc]
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(data)

    asked = transformers.TrainingArguments(
        str(out),
        per_device_train_batch_size=8,
        num_train_epochs=2,
        learning_rate=RATE,
        weight_decay=DECAY,
        warmup_steps=WARM,
        max_grad_norm=0,
        optim="adamw_torch",
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        remove_unused_columns=False,
    )
    trainer = InOrder(module.model, asked, train_dataset=data, data_collator=collate)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of accelerate
@pytest.mark.parametrize("name", CASES)
def test_the_losses_are_those_of_trainer(name: str, trained: Trained, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    kind, task, rank = CASES[name]
    more = {"tie_word_embeddings": True, "eos_token_id": 2} if "Llama" in kind else {}
    library()
    folder = save(tmp_path / "published", kind, **more)
    dataset = f"{{_target_: {NAME}, task: {task}, val_fraction: 0, shuffle: false"
    dataset += ", num_classes: 3}" if task == "classification" else "}"
    words = [f"dataset={dataset}", f"task={task}", f"model.path={folder}"]
    if task == "classification":
        words.append("model.config={hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}")
    run = trained(*COMMON, *words, f"model.lora.rank={rank or 'null'}")
    found = [value for _, value in run.curve("running/loss")]
    expected = losses_of_trainer(folder, task, rank, tmp_path / "trainer")
    assert len(found) == len(expected) == 12
    assert found == pytest.approx(expected, abs=1e-5)
    assert abs(found[-1] - found[0]) > 1e-3
