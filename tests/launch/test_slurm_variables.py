"""Tasks of a scheduler as torch's workers."""

from __future__ import annotations

import pytest

from expt.errors import ConfigError
from expt.launch.slurm_variables import adopt, check, first_host, tasks_per_node

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
}


def test_a_task_of_srun_is_a_worker() -> None:
    environment = dict(SRUN)
    adopt(environment)
    own = {key: value for key, value in environment.items() if key not in SRUN}
    assert own == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(20_000 + (131 * 4711 + 2) % 10_000),
    }
    check(environment)


def test_the_last_node_has_fewer_tasks_and_a_job_that_was_requeued_says_so() -> None:
    environment = {**SRUN, "SLURM_PROCID": "6", "SLURM_NODEID": "3", "SLURM_RESTART_COUNT": "3"}
    adopt(environment)
    assert (environment["LOCAL_WORLD_SIZE"], environment["TORCHELASTIC_RESTART_COUNT"]) == (
        "1",
        "3",
    )


def test_a_task_of_submitit_on_this_machine_is_a_worker() -> None:
    environment = {
        "SUBMITIT_LOCAL_NTASKS": "2",
        "SUBMITIT_LOCAL_GLOBALID": "1",
        "SUBMITIT_LOCAL_LOCALID": "1",
        "SUBMITIT_LOCAL_JOB_ID": "88",
    }
    adopt(environment)
    assert {
        key: environment[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    } == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == (
        "127.0.0.1",
        str(20_000 + 131 * 88 % 10_000),
    )


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
        {**SRUN, "RANK": "0", "WORLD_SIZE": "2"},
        {"SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_GLOBALID": "0"},
    ],
    ids=["nothing", "one task", "torchrun within srun", "one task of submitit"],
)
def test_whoever_is_alone_or_has_torchs_variables_stays_as_it_is(
    environment: dict[str, str],
) -> None:
    before = dict(environment)
    adopt(environment)
    assert environment == before


def test_where_rank_0_is_may_be_set_by_hand() -> None:
    environment = {**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    adopt(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "29500")


def test_a_worker_that_cannot_find_the_others_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="this is a worker; LOCAL_WORLD_SIZE, MASTER_PORT must be set too"
    ):
        check({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a"})


@pytest.mark.parametrize(
    ("text", "counts"), [("2(x3),1", [2, 2, 2, 1]), ("8", [8]), ("4,2(x2)", [4, 2, 2])]
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[07-09,12],login1", "gpu07"), ("a1,a2", "a1"), ("n[3,5]-ib", "n3-ib"), ("solo", "solo")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_two_jobs_on_a_node_have_two_ports() -> None:
    ports = set[str]()
    for job in range(100, 200):
        environment = {**SRUN, "SLURM_JOB_ID": str(job)}
        adopt(environment)
        ports.add(environment["MASTER_PORT"])
    assert len(ports) == 100
