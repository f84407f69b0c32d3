"""Copies of run folders, which a person has made beside the runs: a record says the name that its folder was given."""

from __future__ import annotations

from expt.runs.paths import RunPaths
from expt.runs.result import Record


def has_own_name(paths: RunPaths, record: Record) -> bool:
    """Whether the folder has the name that its run was given; a copy has another."""
    return record.get("name", paths.folder.name) == paths.folder.name
