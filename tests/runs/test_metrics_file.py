"""metrics.jsonl, read while it is written."""

from __future__ import annotations

from pathlib import Path

from expt.runs.metrics_file import MetricsReader, MetricsWriter, until
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


def test_checkpointed_part_of_a_rewritten_file_is_found_by_steps(
    tmp_path: Path,
) -> None:
    paths = RunPaths(tmp_path)
    writer, sizes = MetricsWriter(paths), list[int]()
    for step in (1, 2, 3):
        writer.write(step, 1, {"loss": 0.5, "speed": 1000.0 + step})
        sizes.append(writer.num_bytes)
    writer.close()
    text = paths.metrics.read_bytes()
    assert [until(paths, size, step) for step, size in zip((1, 2, 3), sizes, strict=True)] == [
        text[:size] for size in sizes
    ]
    paths.metrics.write_bytes(text.replace(b"1001.0", b"999.25"))
    for size in (sizes[1] - 1, sizes[2], sizes[1] + 9):
        assert until(paths, size, 2) == text[: sizes[1]].replace(b"1001.0", b"999.25")
    assert until(RunPaths(tmp_path / "none"), 9, 2) == b""
    writer = MetricsWriter(paths)
    writer.write(3, 1, {"loss/test": 0.25})
    writer.close()
    tested = paths.metrics.read_bytes()
    assert until(paths, sizes[2] - 1, 3) == tested[: sizes[2]], (
        "the test is after the last checkpoint"
    )
    assert until(paths, sizes[2] - 1, 3, tests_later=False) == tested
