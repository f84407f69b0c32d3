"""expt in a notebook: workers start from a running kernel, and the second run finds them warm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import environment
from tests.late import Late

nbformat: Any = Late("nbformat")
nbclient: Any = Late("nbclient")

RUN = """
import expt
result = expt.run("world_size=2", "epochs=2")
assert result.record["world_size"] == 2
print(f"accuracy {result.metrics['accuracy/test']:.3f}")
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the kernel to work in, with nothing of this machine's own settings of Jupyter."""
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    for variable, value in environment().items():
        monkeypatch.setenv(variable, value)
    return tmp_path


def executed(folder: Path, *cells: str) -> list[str]:
    """The printed text of each cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(folder)}}).execute()
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]


@pytest.mark.slow
def test_runs_in_a_notebook(kernel: Path) -> None:
    again = RUN.replace("epochs=2", "epochs=3")
    mistake = "try: expt.run('epochs=0')\nexcept expt.errors.ConfigError as error: print(error)"
    first, second, refused = executed(kernel, RUN, again, mistake)
    assert "accuracy 0." in first
    assert "accuracy 0." in second
    assert "epochs=0: input should be greater than or equal to 1" in refused
    assert len(list(kernel.glob("outputs/*/*/result.json"))) == 2
