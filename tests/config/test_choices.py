"""What a setting can be, told to a shell."""

from __future__ import annotations

import pytest

from expt.config.choices import choices_of


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("batch_norm", {"per_worker", "groups", "sync"}),
        ("ddp.comm_hook", {"bf16", "fp16", "powersgd", "null"}),
        ("optimizer.nesterov", {"true", "false"}),
        ("tensorboard.graph", {"true", "false", "auto"}),
        ("send", {"mlflow", "wandb"}),
        ("epochs", set()),
        ("model", set()),
        ("model.nowhere", set()),
        ("", set()),
    ],
)
def test_they_are_those_of_the_schema(key: str, values: set[str]) -> None:
    assert set(choices_of(key)) == values
