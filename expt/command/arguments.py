"""The words of a command, before Hydra reads them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from expt.command.conf_files import keys
from expt.command.conf_files import options as options_of
from expt.command.overrides import is_readable, parsed
from expt.command.words import WORDS
from expt.config import main_code
from expt.config.datasets import OWN_DATASET_KEYS
from expt.errors import ConfigError, did_you_mean, warn
from expt.runs.paths import RunPaths, is_sweep
from expt.runs.result import COMPLETED, DAMAGED, read_result, results_below
from expt.runs.sweep import latest_sweep
from expt.runs.typed import NAMES_A_RUN, for_strategy, joined, key_of, quoted, unquoted, values_of

WITH_VALUE = {
    "--config-dir",
    "-cd",
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--package",
    "-p",
    "--cfg",
    "-c",
}
OPTIONS = WITH_VALUE | {
    "--help",
    "-h",
    "--hydra-help",
    "--version",
    "--multirun",
    "-m",
    "--run",
    "-r",
    "--resolve",
}
OPTIONS |= {"--info", "-i", "--shell-completion", "-sc", "--experimental-rerun"}
FOLDERS = {"hydra.run.dir", "hydra.sweep.dir"}
"""Keys whose value is one text, commas and all."""


TEXTS = {"search.constraints", "search.when", "search.warm_start"}
"""Keys whose value is a list of texts, which may hold what Hydra's grammar has no reading for."""


class Exact(str):
    """A word that is in Hydra's grammar already, and is not to be read in any other way."""


def readable(arguments: Sequence[str]) -> list[str]:
    """The words as Hydra's grammar takes them: `~` is the home, and what it has no reading for is a
    text, as it stands.

    So `'dataset.root=my data (old)'` and `hydra.run.dir=lr=0.1` need no second pair of quotes.
    """
    options, settings = apart(arguments)
    options = [re.sub(r"(?<==)~(?=/|$)", os.path.expanduser("~"), word) for word in options]
    return [*options, *(word if isinstance(word, Exact) else _readable(word) for word in settings)]


def without_quotes(word: str) -> str:
    """The word as a person may type it: without quotes that `readable` puts there, and escapes that
    nobody needs.
    """
    key, equals, value = word.partition("=")
    simple = f"{key}{equals}{unquoted(value)}"
    if simple == word:
        return word
    (read,) = readable([simple])
    return simple if read == word or (value[-1] not in "'\"" and _are_one(read, word)) else word


def _are_one(word: str, other: str) -> bool:
    """Whether both give one key the same value."""
    if not is_readable(word):
        return False
    one, same = parsed([word, other])
    return not one.is_sweep_override() and one.value() == same.value()


def _readable(word: str) -> str:
    key, equals, value = word.partition("=")
    if not equals or not re.fullmatch(r"[+~]*[\w./@:-]+", key):
        return word
    quote = value[:1] if value[:1] in ("'", '"') else ""
    parts = [value] if quote or key in FOLDERS else value.split(",")
    parts = [
        re.sub(rf"^{quote}~(?=/|{quote}$)", lambda _: quote + os.path.expanduser("~"), part)
        for part in parts
    ]
    changed = f"{key}={','.join(parts)}"
    if (
        key in NAMES_A_RUN
        and len(parts) > 1
        and len(names := values_of(",".join(parts))) < len(parts)
    ):
        as_typed = {part for part in parts if is_readable(f"{key}={part}")}  # null, too
        return f"{key}={','.join(name if name in as_typed else quoted(unquoted(name)) for name in names)}"
    if key in FOLDERS and not quote:
        return f"{key}={quoted(parts[0])}"
    if key in TEXTS and value[:1] in ("[", "{") and not is_readable(word):
        return _as_texts(key, value) or word
    is_list = value[:1] in ("[", "{") or ("," in value and re.search(r"[][(){}]", value))
    if quote or is_list or value.startswith("interval(") or is_readable(changed):
        return changed
    return f"{key}={','.join(map(quoted, parts))}"


def _as_texts(key: str, value: str) -> str | None:
    """A list of texts as YAML has it, or a mapping to some, in Hydra's grammar."""
    try:
        found = yaml.safe_load(value)
    except yaml.YAMLError:
        return None
    if isinstance(found, dict):
        several = {
            name: texts if isinstance(texts, list) else [texts] for name, texts in found.items()
        }
        found = [f"{name}: {text}" for name, texts in several.items() for text in texts]
    return f"{key}=[{','.join(quoted(str(text)) for text in found)}]"


def with_own_keys(arguments: Sequence[str]) -> list[str]:
    """The words, with `++` before the keys that every dataset of a person's own has, in its YAML or
    not.
    """
    chosen = next(
        (word.partition("=")[2] for word in reversed(arguments) if word.startswith("dataset=")), ""
    )
    if not chosen or chosen in [path.stem for path in options_of("dataset")]:
        return list(arguments)
    pattern = re.compile(rf"dataset\.({'|'.join(OWN_DATASET_KEYS)})[.=]")
    return [f"++{word}" if pattern.match(word) else word for word in arguments]


def refuse_used_folder(arguments: Sequence[str]) -> None:
    """Raise ConfigError before Hydra writes into the folder of an earlier run."""
    for argument in arguments:
        key, equals, value = argument.partition("=")
        folder = Path(unquoted(value))
        if key in ("hydra.run.dir", "hydra.sweep.dir") and equals and not unquoted(value):
            raise ConfigError(f"{argument}: names no folder; is a variable of the shell empty?")
        if key != "hydra.run.dir" or "resume=auto" in arguments:
            continue
        paths = RunPaths(folder)
        if not paths.result.exists():
            for path in (paths.metrics, paths.checkpoints, paths.logs(0).parent):
                if path.exists():
                    raise ConfigError(
                        f"hydra.run.dir={folder}: holds {path.name} already; choose another folder"
                    )
            continue
        ended = read_result(paths).get("status") in (COMPLETED, DAMAGED)
        mend = "" if ended else ", or resume that run with resume=auto beside what has changed"
        raise ConfigError(
            f"hydra.run.dir={folder}: holds a run already; choose another folder{mend}"
        )


def refuse_lone(arguments: Iterable[str]) -> None:
    """Raise ConfigError for what concerns a sweep: a single run would do without it, as without a
    dry run.
    """
    for word in arguments:
        if word.startswith(("hydra.launcher.", "hydra/launcher=", "hydra.sweep.")):
            raise ConfigError(f"{word}: is for a sweep; add -m")


def refuse_mistyped_folder(arguments: Sequence[str]) -> None:
    """Raise ConfigError where `resume=auto` and a folder are all that is typed, and no run is
    there.

    With settings beside them a new run may be meant, which the same command resumes later: of that
    a warning tells."""
    sweeps = bool({"-m", "--multirun"} & {*arguments})
    key, what = ("hydra.sweep.dir", "sweep") if sweeps else ("hydra.run.dir", "run")
    folders = [word for word in arguments if word.startswith(f"{key}=")]
    if "resume=auto" not in arguments or not folders:
        return
    folder = Path(unquoted(folders[-1].partition("=")[2]))
    paths = RunPaths(folder)
    there = (
        is_sweep(folder)
        if sweeps
        else any(map(Path.exists, (paths.result, paths.overrides, paths.checkpoints)))
    )
    if (
        there
        or "$" in str(folder)
        or str(folder) == "latest"
        or (folder.exists() and not folder.is_dir())
    ):
        return
    missing = f"it holds no {what}" if folder.exists() else "there is no such folder"
    if sweeps or len(arguments) > 2:
        warn(f"{key}={folder}: {missing}; a new {what} begins there")
        return
    inside = [paths.folder for paths, _ in results_below(folder)] if folder.is_dir() else []
    beside = (
        [str(path) for path in folder.parent.glob("*") if path.is_dir()]
        if folder.parent.is_dir()
        else []
    )
    hint = (
        f" {inside[-1]} is one." if inside else did_you_mean(str(folder), {*beside} - {str(folder)})
    )
    raise ConfigError(f"{key}={folder}: {missing}, so no run to resume.{hint}")


def with_earlier(arguments: Sequence[str]) -> list[str]:
    """The arguments, with those of the run that `resume=auto` goes on with before them, as far as
    they aren't given.
    """
    given = {key_of(word): unquoted(word.partition("=")[2]) for word in arguments}
    run_paths = RunPaths(Path(given.get("hydra.run.dir", "")))
    if given.get("resume") != "auto":
        return list(arguments)
    if "hydra.run.dir" not in given and not {"-m", "--multirun"} & {*arguments}:
        raise ConfigError(
            "resume=auto: goes on in the folder of a run; name it, as in hydra.run.dir=FOLDER"
        )
    main_code.find_kept(run_paths.code)
    words = [*searched(run_paths, arguments), *_earlier(run_paths, given, arguments), *arguments]
    if not run_paths.result.exists():  # killed before it began, or new
        return words
    # What Hydra wrote about the run when it was started stays.
    return [*words, "hydra.output_subdir=null"]


def _earlier(run_paths: RunPaths, given: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """What began the run, but for `resume`, the keys that are `given`, and what a strategy among
    them cannot have.
    """
    if not run_paths.overrides.exists():
        return []
    words = [str(word) for word in OmegaConf.load(run_paths.overrides)]
    kept = [word for word in words if key_of(word) != "resume" and key_of(word) not in given]
    return for_strategy(kept, words, arguments)


def searched(run_paths: RunPaths, arguments: Sequence[str]) -> list[str]:
    """The folder of a person's own YAML that the run was started with, unless one is named."""
    if not run_paths.hydra_settings.exists() or any(
        word.startswith(("--config-dir", "-cd")) for word in arguments
    ):
        return []
    sources = (
        OmegaConf.select(OmegaConf.load(run_paths.hydra_settings), "hydra.runtime.config_sources")
        or ()
    )
    return [
        f"--config-dir={source.path}" for source in sources if source.provider == "command-line"
    ]


def with_latest(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the newest sweep's folder in the place of `hydra.sweep.dir=latest`."""
    if "hydra.sweep.dir=latest" not in arguments:
        return list(arguments)
    newest = latest_sweep(Path("outputs"))
    if newest is None:
        raise ConfigError("hydra.sweep.dir=latest: there is no sweep in outputs/sweeps yet")
    return [
        f"hydra.sweep.dir={quoted(newest)}" if word == "hydra.sweep.dir=latest" else word
        for word in arguments
    ]


def refuse_unnamed(arguments: Sequence[str]) -> None:
    """Raise ConfigError for `=3`, a command among settings, and `--epochs 5`: Hydra's own errors
    are no help.
    """
    options, settings = apart(arguments)
    for option, following in zip(options, [*options[1:], *settings[:1], ""], strict=False):
        if option.startswith("-"):
            _refuse_unknown_option(option, following)
    for word in settings:
        key, equals, _ = word.partition("=")
        if not key:
            raise ConfigError(
                f"{word}: not of the form key=value; quote values with spaces or brackets"
            )
        if not equals and word in WORDS:
            raise ConfigError(
                f"{word}: a command stands alone or first, as in python -m expt {word}"
            )


def refuse_several_samplers(arguments: Sequence[str]) -> None:
    """Raise ConfigError for `search=tpe,random`: Hydra would make a grid of them, or take the last."""
    for word in apart(arguments)[1]:
        key, _, value = word.partition("=")
        if key == "search" and (names := re.findall(r"\w+", value.removeprefix("choice")))[1:]:
            first = f"search={names[0]} hydra.sweep.dir=FOLDER"
            raise ConfigError(
                f"{word}: a search has one sampler; type a command for each, as with {first}"
            )


def warn_of_repeated(arguments: Sequence[str]) -> None:
    """Say which of two values of one key counts: Hydra takes the last, and says nothing."""
    settings = apart(arguments)[1]
    keys_typed = [key_of(word) for word in settings]
    last = dict(zip(keys_typed, settings, strict=True))
    for key, word in dict.fromkeys(zip(keys_typed, settings, strict=True)):
        if (counts := last[key]) != word:
            warn(f"{word}: the key is there twice, and the last counts, {counts}")


def _refuse_unknown_option(option: str, following: str) -> None:
    name, _, value = option.partition("=")
    known = name in OPTIONS or (len(name) > 3 and any(long.startswith(name) for long in OPTIONS))
    if known or (name[1:2] != "-" and any(name.startswith(short) for short in WITH_VALUE)):  # -cjob
        return
    key = name.lstrip("-").replace("-", "_")
    value = value or ("" if "=" in following or following.startswith("-") else following) or "..."
    if key in keys():
        raise ConfigError(f"{option}: settings have no dashes; type {key}={value}")
    raise ConfigError(f"{option}: there is no such option; see python -m expt --help")


def options_first(arguments: Sequence[str]) -> list[str]:
    """The same words with the options in front: Hydra's parser loses what follows an option that
    follows a setting.
    """
    options, settings = apart(arguments)
    return [*options, *settings]


def apart(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options with their values, and settings."""
    options, settings, words = list[str](), list[str](), iter(arguments)
    for word in words:
        if not word.startswith("-"):
            settings.append(word)
            continue
        options.append(word)
        if word in WITH_VALUE:
            options += [value for value in [next(words, None)] if value is not None]
    return options, settings


def continue_command(folder: Path) -> str:
    """What to type to go on with the sweep of `folder`: the same command, there."""
    words = [word for word in sys.argv[1:] if not word.startswith("hydra.sweep.dir=")]
    # Hydra wants all settings side by side.
    place = max(
        (index for index, word in enumerate(words, 1) if "=" in word and word[0] != "-"),
        default=len(words),
    )
    words.insert(place, f"hydra.sweep.dir={quoted(folder)}")
    return joined(["python", "-m", "expt", *words])
