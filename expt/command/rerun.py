"""`expt rerun`: a run once more from its own record, to the same numbers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from expt import machine
from expt.command import terminal
from expt.command.command_line import kept_words
from expt.command.words import Parser, last_value
from expt.config import kept_code, own_code
from expt.config import parse as parsing
from expt.config.identity import PARTS, Identity, changed_parts, digest
from expt.config.schema import RunConfig
from expt.data.fingerprint import identity_of
from expt.errors import ConfigError, warn
from expt.launch import forkserver
from expt.launch.launcher import launcher, refuse_in_torchrun
from expt.runs import paths, provenance
from expt.runs.named_checkpoint import no_run
from expt.runs.paths import RunPaths
from expt.runs.result import COMPLETED, DAMAGED, Record, read_result, result_of_any
from expt.runs.view.text import Console, say

NOT_REPEATED = ("speed/", "memory/", "ranks/")
"""Tags that tell of the machine."""


def main(words: Sequence[str]) -> int:
    """Train the run of the folder that `words` name. Raises as `rerun` does."""
    about = "Repeat a run with all its recorded settings."
    parser = Parser("rerun", about)
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="folder of a run, also in a sweep")
    add("into", nargs="?", metavar="NEW_FOLDER", help="[outputs/DATE/TIME]")
    asked = parser.parse_args(words)
    forkserver.warm()
    rerun(asked.folder, asked.into, typed_at=time.monotonic())
    return 0


@machine.not_world_writable()
def rerun(folder: Path, new: str | Path | None, *, typed_at: float) -> RunPaths:
    """Repeat the run of `folder` in `new` or a folder named after the time; return that.

    Raises ConfigError where that is not a run's folder or it can't run here, RunFailed or
    Interrupted as any run.
    """
    if "=" in str(new).partition("/")[0]:
        raise ConfigError(f"{new}: a rerun takes no settings; a folder of this name is ./{new}")
    into = None if new is None else Path(new)
    from expt.command.run import Command, removed_if_refused, train  # late: Hydra

    how = launcher()
    refuse_in_torchrun("a rerun")
    then = _record_of(folder)
    kept_code.find_kept(RunPaths(folder).code)
    config = config_at_start(then, RunPaths(folder))
    for line in provenance.differences(then):
        warn(line)
    if into is not None and not RunPaths(into).result.exists():
        paths.refuse_mixed(into, "hydra.run.dir")
    run_paths = RunPaths(
        into or Path(paths.make_unused_folder(time.strftime("outputs/%Y-%m-%d/%H-%M-%S")))
    )

    this = Command(how, typed_at, terminal.console(quiet=False))
    files = {each.stem: each.read_text() for each in RunPaths(folder).hydra.glob("*.yaml")}
    with removed_if_refused(run_paths):
        identity = identity_of(config, run_paths)
    for line in _differences(config, identity, then):
        warn(line)
    words = then["arguments"]
    try:
        train(this, words, config, run_paths, hydra=files, identity=identity, rerun_of=folder)
    finally:
        this.sending.close()
        this.sending.wait()
    compare(then, read_result(run_paths))
    return run_paths


def _record_of(folder: Path) -> Record:
    """Return the record of a run that got its settings. Raises ConfigError where there is none."""
    record = result_of_any(RunPaths(folder))
    if record.get("status") == DAMAGED:
        raise ConfigError(f"{RunPaths(folder).result}: is damaged")
    if not {"config", "identity", "content", "arguments"} <= record.keys():
        raise ConfigError(f"{folder}: {no_run(folder)}")
    return record


def config_at_start(then: Record, run_paths: RunPaths) -> RunConfig:
    """Return the configuration with which a run began, checked against this machine."""
    config = parsing.parse(parsing.settings_of(then["config"]), machine.detect())
    if config.resume != "auto":
        return config
    # It was interrupted and resumed; its source is in the overrides typed at first.
    source = last_value(kept_words(run_paths), "resume")
    return dataclasses.replace(config, resume=None if source in ("auto", "null") else source)


def _differences(config: RunConfig, now: Identity, then: Record) -> list[str]:
    """Return a line for each part of the run's identity that has changed since."""
    before = then["content"]
    sources = (None, then["config"]["resume"])
    digests = [digest(dataclasses.replace(config, resume=source), before) for source in sources]
    parts = {*changed_parts(before, now.content)}
    if own_code.changed(then):
        parts.add("code")
    if now.content.get("code") is None:  # an error says so
        parts.discard("code")
    found = [f"the {name} changed since that run" for part, name in PARTS.items() if part in parts]
    if then["identity"] not in digests:
        found.insert(0, "what the run took from the environment differs now")
    return found


def compare(then: Record, now: Record) -> None:
    """Report whether the numbers are the same."""
    if then.get("status") != COMPLETED:
        return
    before, after = then["metrics"], now["metrics"]
    tags = [tag for tag in before.keys() | after.keys() if not tag.startswith(NOT_REPEATED)]
    both = {tag: (before.get(tag), after.get(tag)) for tag in sorted(tags)}
    differ = [
        f"{tag} {one} then, {other} now"
        for tag, (one, other) in both.items()
        if one != other and not (one != one and other != other)  # nan is as nan
    ]
    terminal.put(repeated=not differ)
    if differ:
        warn(f"the numbers differ from those of the original run: {', '.join(differ)}")
    else:
        say(Console(), f"repeated     the same numbers in all {len(both)} metrics")
