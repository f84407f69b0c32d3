"""metrics.jsonl, read while it is written."""

from __future__ import annotations

from pathlib import Path

from expt.runs.metrics_file import MetricsReader, MetricsWriter
from expt.runs.paths import RunPaths


def test_a_file_that_was_cut_back_and_has_grown_again_is_read_anew(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    reader, writer = MetricsReader(paths), MetricsWriter(paths)
    writer.write(1, 1, {"loss": 0.5})
    assert [point.step for point in reader.read()] == [1]
    writer.write(2, 1, {"loss": 0.25, "speed": 1.0})
    assert [point.step for point in reader.read()] == [2, 2]
    writer.close()
    paths.metrics.write_text(paths.metrics.read_text().splitlines()[0] + "\n")
    writer = MetricsWriter(paths)
    writer.write(2, 1, {"loss": 0.25, "speed": 1.0625})
    writer.write(3, 1, {"loss": 0.125})
    writer.close()
    assert [point.step for point in reader.read()] == [1, 2, 2, 3]
    assert reader.read() == []
