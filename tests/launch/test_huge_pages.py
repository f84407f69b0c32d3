"""Large pages: they hold what was there, and are there where the kernel has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from expt.launch import huge_pages
from tests.conftest import python

PROGRAM = """
import re
from pathlib import Path
from expt.launch import huge_pages

def large():
    return int(re.search(r"AnonHugePages: +(\\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1])

text = bytes(range(256)) * 2**17
before = large()
number = huge_pages.collapse()
assert text == bytes(range(256)) * 2**17
print(number, large() - before)
"""


def test_what_is_in_large_pages_is_what_was_there(tmp_path: Path) -> None:
    done = python(PROGRAM, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    number, kibibytes = map(int, done.stdout.split())
    if not number:
        pytest.skip("a kernel without MADV_COLLAPSE")
    assert number >= 8
    assert kibibytes > 2**14


def test_it_begins_with_memory_of_its_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = (
        "00200000-00600000 rw-p 00000000 00:00 0 \n"
        "00700000-00b00000 rw-p 00000000 00:00 0      [heap]\n"
        "00c00000-01000000 r--p 00000000 00:00 0 \n"
        "01000000-01400000 rw-s 00000000 00:01 5     /dev/zero (deleted)\n"
        "01400000-01800000 rw-p 00000000 fd:00 7     /usr/lib/a library.so\n"
        "01900000-01a00000 rw-p 00000000 00:00 0 \n"
    )
    monkeypatch.setattr(Path, "read_text", lambda path: maps)
    assert huge_pages._addresses() == [0x200000, 0x400000, 0x800000]
