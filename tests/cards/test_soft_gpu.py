"""Soft GPUs themselves: each of their checks can fail, and their numbers are the CPU's."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import soft_gpu
from tests.cards import checks, numbers
from tests.conftest import Cards, Trained
from tests.facade import Patch, environment, python, run

SEEN: list[tuple[Callable[[], None], dict[str, object]]] = [
    (checks.the_visible_cards_are_listed, {"count": 3, "memory": 1e9, "capability": "7.5"}),
    (checks.without_nvml_torch_still_counts, {"count": 2, "nvml": False}),
    (checks.no_card_is_there, {"count": 0}),
    (checks.tensors_of_two_devices_are_refused, {}),
    (checks.an_illegal_access_stays, {"fail_at": 5}),
    (checks.memory_ends, {"memory": 1e9, "full": (1,)}),
    (checks.memory_is_shared_by_processes_until_their_end, {"memory": 1e9}),
    (
        checks.a_dead_card_has_no_context_and_a_context_takes_memory,
        {"dead": (1,), "memory": 1e9, "context": 6e8},
    ),
    (checks.a_context_finds_no_room, {"memory": 1e9, "context": 2e9}),
    (checks.new_memory_is_not_a_number, {"poison": True}),
    (checks.copies_come_late, {"late": True}),
    (checks.what_has_no_numbers_fails_by_name, {}),
    (checks.sync_debug_mode_warns_where_cuda_waits, {}),
    (checks.random_numbers_come_again, {}),
    (checks.collectives_are_right, {"count": 3}),
    (checks.batch_norm_is_synchronised, {"count": 3}),
    (checks.two_ranks_on_one_card_are_refused, {}),
    (checks.unlike_collectives_are_refused, {}),
    (checks.a_rank_that_does_not_come_is_waited_for, {}),
    (checks.data_parallel_has_its_cards_in_one_process, {}),
    (numbers.operators_are_those_of_the_cpu, {}),
    (numbers.models_train_as_on_the_cpu, {}),
    (numbers.half_precision_is_cudas, {}),
]
"""What a process sees, and the cards that it has."""
SAID = {
    checks.copies_come_late: "pinned bytes at",
    checks.what_has_no_numbers_fails_by_name: "cudaStreamBeginCapture is not there",
    checks.two_ranks_on_one_card_are_refused: "Duplicate GPU detected",
}


def in_process(check: Callable[[], None], cwd: Path, **extra: str) -> str:
    """What it says on stderr, when all that it asserts is so."""
    program = f"from {check.__module__} import {check.__name__} as check; check()"
    done = python(program, cwd=cwd, **extra)
    assert done.returncode == 0, done.stderr
    return done.stderr


FAST = (checks.what_has_no_numbers_fails_by_name, checks.collectives_are_right, checks.memory_ends)


@pytest.mark.parametrize(
    ("check", "wishes"),
    [
        pytest.param(*seen, id=seen[0].__name__, marks=() if seen[0] in FAST else pytest.mark.slow)
        for seen in SEEN
    ],
)
def test_a_process_sees(
    check: Callable[[], None], wishes: dict[str, object], cards: Cards, tmp_path: Path
) -> None:
    cards(**wishes)
    assert SAID.get(check, "") in in_process(check, tmp_path, SOFT_GPU_NCCL_TIMEOUT="2")


def test_a_fork_and_contexts_are_traced(cards: Cards, tmp_path: Path) -> None:
    cards(trace=tmp_path / "trace")
    in_process(checks.a_fork_cannot_use_the_driver, tmp_path)
    events = [line.split(" ", 1)[1] for line in (tmp_path / "trace").read_text().splitlines()]
    assert sorted(events) == [*["context 1"] * 2, *["driver"] * 2, "forked"]


def test_commands_and_runs_have_cards(cards: Cards, trained: Trained, tmp_path: Path) -> None:
    cards(trace=tmp_path / "trace")
    done = run("gpus=[1,3]", "epochs=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    events = [line.split(" ", 1) for line in (tmp_path / "trace").read_text().splitlines()]
    assert sorted(event for _, event in events) == [*("context 1", "context 3", "driver", "driver")]
    assert len({pid for pid, _ in events}) == 2
    result = trained("gpus=1", "epochs=1").result
    assert (result["status"], result["devices"]) == ("completed", ["0"])
    cards(count=0)
    assert trained("gpus=auto", "epochs=1", name="none").result["devices"] == []


def test_what_cannot_be_staged_is_refused() -> None:
    with pytest.raises(TypeError, match="no colour"):
        soft_gpu.staged(colour="red")


@pytest.mark.parametrize("wrong", ["SOFT_GPU_COUNT=17", "SOFT_GPU_MEMORY=6GB"])
def test_a_value_that_cannot_be_staged_is_refused(wrong: str, cards: Cards) -> None:
    name, _, value = wrong.partition("=")
    variables = environment(**{**cards(), name: value})
    asked = "from ctypes import *; n = byref(c_size_t()); CDLL(None).cudaMemGetInfo(n, n)"
    command = [sys.executable, "-c", asked]  # as torch does
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"soft GPUs: {wrong}: use" in done.stderr


def test_it_says_why_it_cannot_be_built(cards: Cards, tmp_path: Path, monkeypatch: Patch) -> None:
    cards()  # where it can be built
    sources = shutil.copytree(soft_gpu.SOURCES, tmp_path / "sources")
    (sources / "runtime.c").write_text("#error no such thing\n")
    monkeypatch.setattr(soft_gpu, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(subprocess.CalledProcessError) as error:
        soft_gpu.built.__wrapped__()
    assert "no such thing" in error.value.stderr
    assert [path.suffix for path in (tmp_path / "expt-soft-gpu").iterdir()] == [".lock"]
    monkeypatch.setenv("PATH", "")
    with pytest.raises(soft_gpu.Unavailable, match=r"gcc, g\+\+, nm"):
        soft_gpu.built.__wrapped__()


def test_any_command_has_four(cards: Cards, monkeypatch: Patch) -> None:
    for name in cards():
        monkeypatch.delenv(name)
    script = Path(__file__).parents[2] / "scripts" / "soft_gpu"
    counted = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"
    done = subprocess.run([script, "python", "-c", counted], capture_output=True, text=True)
    assert done.stdout == "4\n", done.stderr
