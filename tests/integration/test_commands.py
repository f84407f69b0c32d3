"""Every command that README.md, docs/ or expt tells a person to type works in a shell."""

import functools
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from expt.command import report
from expt.command.conf_files import keys_in_yaml
from expt.command.grammar import Override, parse, readable
from expt.command.help import EXAMPLES
from expt.command.words import WORDS, options_of
from scripts.documents.pages import Command, File, steps
from tests.composing import composer
from tests.facade import as_typed, run

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = (ROOT / "README.md", *PAGES)
NO_SETTINGS = {
    *as_typed(
        "KEY device weights_only nodesplitter MASTER_PORT early_stop.metric split which folder"
        " quiet EXPT_TRUST_CODE sep"
    ),
    *as_typed(
        "hydra.run.dir hydra.sweep.dir hydra.mode hydra/launcher hydra/callbacks hydra/sweeper"
    ),
}
"""What else stands before an equals sign."""
PROGRAMS = ("python", "expt", "pip", "torchrun", "tensorboard", "pytest")
PRINTED = re.compile(r"(?:python -m expt|tensorboard --logdir) .*$", re.MULTILINE)


def through_bash(commands: Sequence[str]) -> list[list[str]]:
    """Return each command's words by bash; an unmatched pattern is an error, as in zsh."""
    stubs = [f"{name}() {{ printf '%s\\0' {name} \"$@\" $'\\n'; }}" for name in PROGRAMS]
    script = "\n".join(["shopt -s failglob", "set -e", *stubs, *commands])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    told = [words.split("\0") for words in done.stdout.split("\0\n\0")[:-1]]
    assert len(told) == len(commands)
    return told


def check(words: Sequence[str]) -> None:
    """Check that expt's parsers take the words, and that they can be composed."""
    program, *rest = words
    if rest[:2] == ["-m", "expt"]:
        rest = rest[2:]
    elif "expt" in rest:  # torchrun
        rest = rest[rest.index("expt") + 1 :]
    elif program != "expt":
        return
    if rest[:1] == ["report"]:
        report.parse(rest[1:])
    if (rest and rest[0] in WORDS) or "-sc" in rest:
        return
    typed = [word for word in rest if word not in ("--help", "--version", "--json")]
    settings = [
        word
        for word in map(readable, options_of(typed).settings)
        if "=" in word and "..." not in word and not word.startswith("KEY=")
    ]
    for setting in compositions(settings):
        can_be_composed(tuple(setting))


@functools.cache
def can_be_composed(settings: tuple[str, ...]) -> None:
    composer().compose(settings)


def _values(axis: Override) -> list[str]:
    """Those of a grid; of an interval its ends."""
    if axis.is_discrete_sweep():
        return [*axis.sweep_string_iterator()]
    interval: Any = axis.value()
    return [str(interval.start), str(interval.end)]


def compositions(settings: Iterable[str]) -> list[list[str]]:
    """The settings with the first value of each sweep, and with the last."""
    parsed = parse([word for word in settings if not word.startswith("hydra")])
    texts = [
        _values(one) if one.is_sweep_override() else [one.get_value_element_as_str()]
        for one in parsed
    ]
    names = [one.get_key_element() for one in parsed]
    first, last = (
        [f"{name}={values[end]}" for name, values in zip(names, texts, strict=True)]
        for end in (0, -1)
    )
    return [first] if first == last else [first, last]


def written_in(document: Path) -> list[str]:
    """Return a document's commands, except mistakes and those that need custom YAML."""
    text = document.read_text()
    found = list(steps(text))
    parts = [Path(step.name).parts for step in found if isinstance(step, File)]
    own = {f"{part[1]}={Path(part[2]).stem}" for part in parts if part[0] == "conf"}
    own |= {f"experiment={folder.name}" for folder in (ROOT / "scripts/examples").iterdir()}
    typed = [step.words for step in found if isinstance(step, Command) and not refused(step)]
    without_blocks = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    among = [
        *re.findall(r"`([^`\n]+)`", without_blocks),
        *re.findall(r"^    (\S.+)$", without_blocks, re.MULTILINE),
    ]
    lines = [
        line for line in [*typed, *among] if line.split()[0] in PROGRAMS and len(line.split()) > 1
    ]
    return [re.sub(r" && .*", "", line) for line in lines if not own & set(line.split())]


def refused(command: Command) -> bool:
    return any(line.startswith(("error: ", '[2,{"kind":')) for line in command.shown)


@pytest.mark.slow
def test_what_the_documents_say_can_be_pasted() -> None:
    written = [command for document in DOCUMENTS for command in written_in(document)]
    assert len(written) > 100
    commands = (re.split(r" \| | >", each)[0] for each in written)
    for words in through_bash([*dict.fromkeys(commands)]):
        check(words)


def test_each_page_is_linked_and_leads_to_what_there_is() -> None:
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()
    for document in DOCUMENTS:
        links = re.findall(r"\]\(([^):#]+)[^)]*\)", document.read_text())
        assert all((document.parent / link).exists() for link in links if link != "https"), document
    contents = re.findall(
        r"^- \[.+?\]\((\w+\.md)\)", (ROOT / "docs/README.md").read_text(), re.MULTILINE
    )
    assert {page.name for page in PAGES} == {*contents, "README.md"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_the_settings_that_a_document_names_are_there(document: Path) -> None:
    text = document.read_text()
    if document.stem == "coming_from":  # its tables' first column is a peer's
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    named = set(re.findall(r"`([\w./]+)=[^`]*`", text)) - {*keys_in_yaml(), *NO_SETTINGS}
    assert not {key for key in named if not key.startswith("hydra.launcher.")}


def test_what_help_says_can_be_pasted() -> None:
    examples = [
        line.strip().split("   ")[0] for line in report.EXAMPLES.splitlines() if "python -m" in line
    ]
    commands = [*(command for command, _ in EXAMPLES), *examples]
    for words in through_bash(commands):
        check(words)


OWN = """
import torch
class Net(torch.nn.Sequential):
    def __init__(self, *, channels, image_size, num_classes):
        pixels = channels * image_size[0] * image_size[1]
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(pixels, num_classes))
"""


def test_what_a_failed_run_says_resumes_it(tmp_path: Path) -> None:
    (tmp_path / "own_net.py").write_text(OWN)
    (tmp_path / "my conf/model").mkdir(parents=True)
    (tmp_path / "my conf/model/mine.yaml").write_text("_target_: own_net.Net\n")
    typed = ["--config-dir", "my conf", "model=mine", "hydra.run.dir=it's lr=0.1, (mine)"]
    few = as_typed("epochs=1 world_size=1 checkpoint.every_steps=1 tensorboard.images=false")
    failed = run(*typed, *few, cwd=tmp_path, EXPT_FAULT="0:5:raise:once")
    assert failed.returncode == 1
    told, *_ = PRINTED.findall(failed.stderr)
    ((_, *again),) = through_bash([told])
    done = run(*again[2:], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for _, *look in through_bash(PRINTED.findall(done.stdout)):
        assert look[0] == "-m" or Path(tmp_path, look[1]).is_dir()


def test_what_a_sweep_says_runs_its_failures_again(tmp_path: Path) -> None:
    failing = "        if channels == 3: raise OSError\n        super"
    (tmp_path / "own_net.py").write_text(OWN.replace("        super", failing))
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").write_text("_target_: own_net.Net\n")
    data = "dataset=synthetic dataset.channels=1,3 dataset.train_size=200 dataset.test_size=64"
    words = as_typed(f"-m model=mine {data} epochs=1 tensorboard.images=false world_size=1")
    swept = run(*words, "hydra.sweep.dir=a sweep, (mine)", cwd=tmp_path)
    assert swept.returncode == 1
    again, sweep, look = through_bash(PRINTED.findall(swept.stdout))
    assert Path(tmp_path, look[2]).is_dir()
    continued = run(*sweep[3:], cwd=tmp_path)
    assert (continued.returncode, "] done before" in continued.stdout) == (1, True)
    done = run(*again[3:], "--cfg", "job", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "channels: 3" in done.stdout
