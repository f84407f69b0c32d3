"""expt in a notebook: workers start from a running kernel, and the second run finds them warm."""

from pathlib import Path
from typing import Any

import pytest

from expt.late import Late
from tests.facade import Patch, environment

nbformat: Any = Late("nbformat")
nbclient: Any = Late("nbclient")

RUN = """
import expt
result = expt.run("world_size=2", "epochs=2")
assert result.record["world_size"] == 2
print(f"accuracy {result.metrics['accuracy/test']:.3f}")
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder for the kernel to work in, without this machine's settings of Jupyter."""
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    for variable, value in environment().items():
        monkeypatch.setenv(variable, value)
    return tmp_path


def outputs(folder: Path, *cells: str) -> list[Any]:
    """Those of each cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    where = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=100, resources=where).execute()
    return [cell.outputs for cell in notebook.cells]


@pytest.mark.slow
def test_runs_in_a_notebook(kernel: Path) -> None:
    again = RUN.replace("epochs=2", "epochs=3")
    mistake = "try: expt.run('epochs=0')\nexcept expt.errors.ConfigError as error: print(error)"
    cells = outputs(kernel, RUN, again, mistake)
    first, second, refused = ("".join(each.get("text", "") for each in cell) for cell in cells)
    assert "accuracy 0." in first
    assert "accuracy 0." in second
    assert "epochs=0: input should be greater than or equal to 1" in refused
    assert len(list(kernel.glob("outputs/*/*/result.json"))) == 2


NET = """
from torch import nn, relu
class Net(nn.Module):
    def __init__(self, *, channels, image_size, num_classes, width=WIDTH):
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, num_classes)
    def forward(self, images):
        return self.last(relu(self.first(images.flatten(1))))
"""
OWN = """
import expt
result = expt.run(model=Net, epochs=2, world_size=2, quiet=True)
print(result.record["identity"], type(result.load().model))
"""
BAD = """
import threading
LOCK = threading.Lock()
class Bad(Net):
    def forward(self, images): return LOCK
try: expt.run(model=Bad)
except expt.ConfigError as error: print(error)
"""
SHOWN = """
from IPython.display import display
display(result, result.plot())
runs = expt.sweep(model=["mlp", Net], max_steps=2, quiet=True)
runs
"""


@pytest.mark.slow
def test_a_class_of_a_cell_is_trained_and_results_show_themselves(kernel: Path) -> None:
    cells = outputs(kernel, "WIDTH = 8", NET, OWN, SHOWN, "WIDTH = 9", NET, OWN, OWN, BAD)
    first, second, third, refused = (cells[number][0].text for number in (2, 6, 7, 8))
    assert "Net" in first
    assert second != first, "another class, by the constant that it uses"
    assert third == second
    assert "model=Bad: cannot be sent to workers" in refused
    html, figure, sweep = (output.data for output in cells[3])
    assert "data:image/png" in html["text/html"]
    assert "image/png" in figure
    assert "Net" in sweep["text/plain"]
