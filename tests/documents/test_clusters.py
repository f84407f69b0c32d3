"""The files for other schedulers on the page about clusters: read by the packages that they are
for, where these are installed, and their commands as two nodes on this machine."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.documents.following import ROOT
from tests.conftest import Configured
from tests.facade import RunFolder, environment

PAGE = (ROOT / "docs/clusters.md").read_text()
SKY, KUBEFLOW = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S))


def command(document: dict[str, Any]) -> str:
    if document is SKY:
        return str(document["run"])
    trainer = document["spec"]["trainer"]
    return shlex.join([*trainer["command"], *trainer["args"]])


@pytest.mark.parametrize("document", [SKY, KUBEFLOW], ids=["sky", "kubeflow"])
def test_both_start_one_run(document: dict[str, Any], configured: Configured) -> None:
    words = shlex.split(command(document).partition("-m expt ")[2])
    config = configured(*words, "gpus=0", "world_size=8")
    assert (config.model.name, config.resume) == ("resnet18", "auto")


def test_skypilot_takes_its_task() -> None:
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml_config(SKY)
    assert (task.num_nodes, task.run) == (2, SKY["run"])


def test_kubeflow_takes_its_job() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job = models.TrainerV1alpha1TrainJob.from_dict(KUBEFLOW).to_dict()
    assert job["spec"]["trainer"].keys() == KUBEFLOW["spec"]["trainer"].keys()  # it drops others
    assert (job["kind"], job["spec"]["runtimeRef"]) == ("TrainJob", {"name": "torch-distributed"})


@pytest.mark.slow
@pytest.mark.parametrize("document", [SKY, KUBEFLOW], ids=["sky", "kubeflow"])
def test_two_nodes(document: dict[str, Any], tmp_path: Path) -> None:
    """With the variables that the schedulers set."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    typed = command(document).replace("29400", port).replace("/shared/runs/resnet18", "run")
    typed = typed.replace("model=resnet18 dataset=cifar10", "gpus=0 epochs=1")
    ours = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    nodes = [
        subprocess.Popen(
            ["bash", "-c", typed],
            cwd=tmp_path,
            env=environment(
                **ours,
                SKYPILOT_NUM_NODES="2",
                SKYPILOT_NUM_GPUS_PER_NODE="1",
                SKYPILOT_NODE_RANK=rank,
                SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.1",
                PET_NNODES="2",
                PET_NPROC_PER_NODE="1",
                PET_NODE_RANK=rank,
                PET_MASTER_ADDR="127.0.0.1",
                PET_MASTER_PORT=port,
            ),
        )
        for rank in "01"
    ]
    assert [node.wait(100) for node in nodes] == [0, 0]
    result = RunFolder(tmp_path / "run").result
    assert (result["status"], result["world_size"]) == ("completed", 2)
