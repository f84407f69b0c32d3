"""The script that a person writes by hand for a table of numbers: pandas, and a step of a loop.

python -m scripts.baselines.table big.csv
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

ROWS, FEATURES, BATCH_SIZE = 4_000_000, 20, 4096


def write(path: Path) -> None:
    """Write a table of random numbers, of which a column follows from the others."""
    import numpy as np
    import pyarrow
    from pyarrow import csv, parquet

    drawn = np.random.default_rng(0)
    numbers = drawn.standard_normal((ROWS, FEATURES)).astype(np.float32).astype(float).round(6)
    columns = {f"x{place}": column for place, column in enumerate(numbers.T)}
    columns["y"] = (numbers @ drawn.standard_normal(FEATURES)).round(4)
    table = pyarrow.table(columns)
    csv.write_csv(table, path) if path.suffix == ".csv" else parquet.write_table(table, path)


def main(path: str) -> None:
    """Print the seconds to the first step."""
    began = time.time()
    import pandas
    import torch
    from torch import nn

    frame = pandas.read_csv(path) if path.endswith(".csv") else pandas.read_parquet(path)
    targets = torch.from_numpy(frame.pop("y").to_numpy("float32"))[:, None]
    inputs = torch.from_numpy(frame.to_numpy("float32"))
    del frame
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    train = order[len(order) // 5 :]
    inputs = (inputs - inputs[train].mean(0)) / inputs[train].std(0)
    model = nn.Sequential(nn.Linear(inputs.shape[1], 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rows = train[:BATCH_SIZE]
    nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
    optimizer.step()
    print(json.dumps({"system": "by hand", "first_step_s": time.time() - began}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
