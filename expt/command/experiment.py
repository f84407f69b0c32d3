"""What a chosen YAML, an experiment or one's own group, sets beside what is typed, told where it
does not fit.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from expt.command.conf_files import conf_dir
from expt.config.groups import GROUPS
from expt.errors import ConfigError
from expt.runs.typed import key_of


@contextlib.contextmanager
def told(words: Sequence[str], folders: Sequence[Path]) -> Iterator[None]:
    """Raise ConfigError where a typed choice is of another problem than the experiment, whose YAML
    is in `folders`.

    One that is raised within names the experiment, or the choice of a group of one's own, beside
    each key that nobody but this has set."""
    chosen = _Chosen.all_of(words, folders)
    for each in chosen:
        each.refuse_other_problem()
    try:
        yield
    except ConfigError as error:
        problems = list(error.problems)
        for each in chosen:
            problems = each.explained(problems)
        if problems == list(error.problems):
            raise
        raise ConfigError(problems) from error


def folders_of(hydra: Any) -> list[Path]:
    """Where Hydra looked for YAML, by its own part of a configuration."""
    return [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]


class _Chosen:
    """A choice whose YAML sets what lies in other groups."""

    def __init__(
        self, key: str, name: str, content: Mapping[str, Any], typed: Mapping[str, str]
    ) -> None:
        self._key, self._word, self._content, self._typed = key, f"{key}={name}", content, typed
        chosen = {
            key: value for each in content.get("defaults") or () for key, value in _choices(each)
        }
        self._others = {
            group: choice
            for group, choice in typed.items()
            if group in GROUPS and choice != chosen.get(group, "")
        }
        """The choices that are typed, and not the experiment's, by group."""

    @classmethod
    def all_of(cls, words: Sequence[str], folders: Sequence[Path]) -> list[_Chosen]:
        """Those of a command's words, the last that is typed first: its values are the ones that
        count.
        """
        typed = {key_of(word): word.partition("=")[2] for word in words}
        found = list[_Chosen]()
        for key, name in typed.items():
            if key in GROUPS or not (
                re.fullmatch(r"[\w/]+", key) and re.fullmatch(r"[\w./-]+", name)
            ):
                continue
            files = (folder / key / f"{name}.yaml" for folder in (*folders, conf_dir()))
            if file := next(filter(Path.is_file, files), None):
                found.append(cls(key, name, _content(file, file.stat().st_mtime_ns), typed))
        return found[::-1]

    def refuse_other_problem(self) -> None:
        """Raise ConfigError for a choice beside which the experiment's class stays: it would get
        the other's keys.
        """
        for group, choice in self._others.items():
            own = self._content.get(group) if self._key == "experiment" else None
            if (
                isinstance(own, Mapping)
                and "_target_" in own
                and f"{group}._target_" not in self._typed
            ):
                raise ConfigError(
                    f"{self._word} {group}={choice}: the experiment has a {group} of its own,"
                    f" {own['_target_']}, and all else of it goes with that; leave out"
                    f" {group}={choice}, or {self._word}"
                )

    def explained(self, problems: Sequence[str]) -> list[str]:
        """The problems, in the words of who typed none of these keys."""
        found, clashing = list[str](), dict[str, list[str]]()
        for line in problems:
            match = re.match(r"([\w.]+)(?=[=:])", line)
            key = match[1] if match else ""
            group = key.partition(".")[0]
            if not self._alone_sets(key):
                found.append(line)
            elif group in self._others:
                clashing.setdefault(group, []).append(line)
            else:
                found.append(f"{line.rstrip('.')} ({self._word} sets it)")
        return [*(self._clash(group, lines) for group, lines in clashing.items()), *found]

    def _clash(self, group: str, lines: Sequence[str]) -> str:
        choice = f"{group}={self._others[group]}"
        keys = [re.split("[=:]", line)[0] for line in lines]
        if all("there is no such key" in line for line in lines):
            why = f"sets {', '.join(keys)}, which {choice} has not"
            mend = f"add {' '.join(f'~{key}' for key in keys)}"
        else:
            why = f"sets what {choice} takes otherwise ({'; '.join(lines)})"
            mend = f"type {' '.join(f'{key}=...' for key in keys)}"
        return f"{self._word} {choice}: the {self._key} {why}; leave out {choice}, or {mend}"

    def _alone_sets(self, key: str) -> bool:
        """Whether a person's words say nothing of the key, and the experiment does."""
        if any(
            key == typed or key.startswith(f"{typed}.")
            for typed in self._typed
            if typed not in GROUPS
        ):
            return False
        node: Any = self._content
        for part in key.split("."):
            if isinstance(node, Mapping):
                if part not in node:
                    return False
                node = node[part]
        return "." in key or key not in GROUPS


def _choices(entry: object) -> Iterator[tuple[str, Any]]:
    """Of an entry of a list of defaults as `override /model: mlp` the group and the choice."""
    if isinstance(entry, Mapping):
        for key, value in entry.items():
            yield str(key).rpartition(" ")[2].removeprefix("/"), value


@functools.cache
def _content(file: Path, _: int) -> Mapping[str, Any]:
    """What it sets from the root on; by when it was written, too."""
    if not re.search(
        r"^#\s*@package\s+_global_", text := file.read_text(encoding="utf-8"), re.MULTILINE
    ):
        return {}
    found = OmegaConf.to_container(OmegaConf.create(text))
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}
