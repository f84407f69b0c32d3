"""What a test session finds on a machine that has GPUs, as it is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.facade import as_typed

HERE = Path(__file__).parent
WITH_GPUS = """
import os, torch

torch.cuda.is_available = lambda: GIVEN
torch.cuda.device_count = lambda: 2 * GIVEN

def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    print(f"visible={os.environ.get('CUDA_VISIBLE_DEVICES')!r} skipped={len(skipped)}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "visible", "is_run"), [(["-m", "gpu"], "'3'", True), ([], "''", False)]
)
def test_gpu_tests_planned(words: list[str], visible: str, *, is_run: bool, tmp_path: Path) -> None:
    (tmp_path / "with_gpus.py").write_text(WITH_GPUS.replace("GIVEN", str(is_run)))
    asked = as_typed("-m pytest -p with_gpus -n 0 --setup-plan")
    command = [sys.executable, *asked, *words, str(HERE / "gpu")]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "3"}
    done = subprocess.run(
        command, env=env, cwd=HERE.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"visible={visible}" in done.stdout
    assert ("skipped=0" in done.stdout) == is_run
