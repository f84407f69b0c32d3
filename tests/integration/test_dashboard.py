"""What TensorBoard shows of runs beside curves, read back by its own API."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout  # type: ignore[attr-defined]
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler

from expt.config.identity import typed_hyperparameters
from expt.dashboards.events import Value, columns
from expt.errors import RunFailed
from tests.conftest import Trained
from tests.facade import Patch, as_typed, own_model

SUCCESS, FAILURE = 1, 2
ODD_ONE_OUT = """
    if os.environ["RANK"] == "1":
        if self.how == "slow" and self.training:
            time.sleep(0.03)
        if self.how == "drift" and self.steps > 8:  # of 10; weights are compared after step 8
            with torch.no_grad():
                self[1].bias[3] += 1e-6
"""


def pixels(events: EventAccumulator, tag: str) -> np.ndarray:
    return np.asarray(
        Image.open(io.BytesIO(events.Images(tag)[-1].encoded_image_string)).convert("RGB")
    )


def test_pictures_of_what_the_model_sees_and_gets_wrong(trained: Trained) -> None:
    done = trained(
        *as_typed("epochs=2 world_size=1 model=convnet dataset.augment.cutout=3"),
        "tensorboard.images=auto",
    )
    events = EventAccumulator(str(done.folder)).Reload()
    assert set(events.Tags()["images"]) == {
        "images/train", "confusion/val", "mistakes/val", "confusion/test", "mistakes/test"
    }  # fmt: skip
    steps = [event.step for event in events.Images("confusion/val")]
    assert steps == [40], "in a short run at its end only"
    assert pixels(events, "images/train").shape[1] == 350
    assert (pixels(events, "confusion/test") < 100).any()
    proto = events.Tensors("custom_scalars__config__")[0].tensor_proto
    categories = Layout.FromString(proto.string_val[0]).category
    charts = {each.title: [*each.multiline.tag] for part in categories for each in part.chart}
    assert charts["loss/val"] == ["^loss/val$"]
    assert charts["accuracy/train"] == ["^accuracy/train$"]


@pytest.mark.slow
def test_pictures_after_every_epoch_or_never(trained: Trained) -> None:
    options = as_typed("tensorboard.images=true tensorboard.histograms=true eval_split=test")
    few = ("epochs=2", "dataset.train_limit=320")
    every = trained(*few, *options, "objective=accuracy/test", name="every")
    events = EventAccumulator(str(every.folder), {"images": 0, "histograms": 0}).Reload()
    assert [event.step for event in events.Images("confusion/test")] == [5, 10]
    assert [event.step for event in events.Images("images/train")] == [1]
    assert "weights/1.weight" in events.Tags()["histograms"]
    assert [event.step for event in events.Histograms("gradients/1.weight")] == [5, 10]
    off = (f"tensorboard.{key}=false" for key in ("images", "health", "norms"))
    never = trained(*few, *off, name="never")
    tags = EventAccumulator(str(never.folder)).Reload().Tags()
    assert (tags["images"], tags["histograms"]) == ([], [])
    assert not any(tag.startswith(("ranks/", "memory/", "norm_")) for tag in tags["scalars"])
    normal = trained(*few, "tensorboard.images=auto", name="normal")
    for tag in ("loss/train", "loss/test"):
        assert normal.curve(tag) == never.curve(tag), "looking on changes nothing"


@pytest.fixture
def odd_one_out(tmp_path: Path, monkeypatch: Patch) -> Callable[[str], list[str]]:
    """`odd_one_out("slow")`: the words for a model whose rank 1 behaves so."""
    monkeypatch.syspath_prepend(tmp_path)
    few = ["dataset.train_limit=640"]
    return lambda how: [*own_model(tmp_path, ODD_ONE_OUT, "odd", how=how), *few]


@pytest.mark.slow
@pytest.mark.cpu("workers on cards share no memory")
def test_a_rank_that_is_slow_shows(
    odd_one_out: Callable[[str], list[str]], trained: Trained
) -> None:
    values = trained(*odd_one_out("slow"), "epochs=1").result["metrics"]
    assert values["ranks/step_ms_max"] >= 25
    assert values["ranks/step_ms_min"] < values["ranks/step_ms_max"]
    assert values["ranks/all_reduce_share"] > 0, "the other one waits"


@pytest.mark.slow
def test_drift_fails(
    odd_one_out: Callable[[str], list[str]], trained: Trained, tmp_path: Path
) -> None:
    words = odd_one_out("drift")
    with pytest.raises(RunFailed, match="after epoch 1 the weights of rank 1 differ") as caught:
        trained(*words, "epochs=2")
    assert "Traceback" not in str(caught.value)
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [event.value for event in events.Scalars("ranks/unequal_weights")] == [1.0]
    unchecked = trained(*words, "epochs=1", "tensorboard.health=false", name="unchecked")
    assert unchecked.result["status"] == "completed"


def hparams_tab(folder: Path) -> tuple[Any, dict[str, Any]]:
    """What TensorBoard's HPARAMS tab gets from its server: the columns, and a row for each run."""
    events = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
    provider = MultiplexerDataProvider(events, str(folder))
    context = Context(TBContext(multiplexer=events, data_provider=provider, logdir=str(folder)))
    about = context.hparams_metadata(RequestContext(), "")
    experiment = context.experiment_from_metadata(RequestContext(), "", True, about, [])
    every = api_pb2.ListSessionGroupsRequest(allowed_statuses=[0, 1, 2, 3], slice_size=100)  # type: ignore[attr-defined]
    answer = Handler(RequestContext(), context, "", every).run()
    return experiment, {group.name: group for group in answer.session_groups}


def test_the_hparams_tab_equals_the_records_of_a_sweep_with_a_failure(sweep_of_six: Path) -> None:
    experiment, rows = hparams_tab(sweep_of_six)
    paths = sweep_of_six.glob("*/result.json")
    results = {path.parent.name: json.loads(path.read_text()) for path in paths}
    assert rows.keys() == results.keys()
    statuses = sorted(result["status"] for result in results.values())
    assert statuses == ["completed"] * 5 + ["failed"]
    differing = {info.name for info in experiment.hparam_infos if info.differs}
    assert differing == {"model", "optimizer.lr"}
    shown = {info.name for info in experiment.hparam_infos}
    assert experiment.metric_infos[0].name.tag == "(objective)/accuracy/val"
    for name, result in results.items():
        settings = columns(typed_hyperparameters(result["config"], result["overrides"]))
        row = rows[name]
        assert settings.keys() <= shown
        found = {
            key: getattr(each, str(each.WhichOneof("kind"))) for key, each in row.hparams.items()
        }
        assert found == settings
        completed = result["status"] == "completed"
        assert row.sessions[0].status == (SUCCESS if completed else FAILURE)
        values = {value.name.tag: value.value for value in row.metric_values}
        if completed:
            assert {"best/accuracy/val", "accuracy/val", "accuracy/test"} <= values.keys()
        for tag, value in (result.get("metrics") or {}).items():
            assert values[tag] == pytest.approx(value, rel=1e-6), (name, tag)


def test_a_models_own_settings_stand_under_its_name() -> None:
    """TensorBoard shows first what differs, which would be what tells one model from another."""
    own: dict[str, Value] = {"model": "mlp", "model.hidden": "[256]", "dataset": "digits"}
    assert columns({**own, "epochs": 3}) == {
        "model": "mlp", "mlp.hidden": "[256]", "dataset": "digits", "epochs": 3
    }  # fmt: skip
    person: dict[str, Value] = {"model": "_target_", "model.target": "mine.Net"}
    assert columns({**person, "model.kwargs.width": 16}) == {"model": "mine.Net", "Net.width": 16}
