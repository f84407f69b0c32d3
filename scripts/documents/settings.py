"""Every setting with its type, default and meaning, as Markdown: from conf/, the schema, and
docs/own_settings.yaml.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from expt import registry
from expt.command.conf_files import lineage
from expt.command.help import WHEN, keys_with_meaning, rows_of, sections
from expt.config import conf_dir, read_yaml
from expt.config.constraints import DottedName, Target
from expt.config.groups import GROUPS
from expt.config.keys import classes_in, effects_in_words
from expt.config.schema import RunConfig
from scripts.architecture import MAX_COLUMNS_OF_PAGES
from scripts.documents.following import ROOT

OWN = ROOT / "docs" / "own_settings.yaml"
UNIT = re.compile(r"\[(\w+)\]")
UNITS = (
    "images",
    "samples",
    "optimiser steps",
    "epochs",
    "minutes",
    "steps",
    "pixels",
    "MiB",
    "seconds",
    "micro-batches",
)
LIMITS = {Ge: "from {ge}", Gt: "above {gt}", Le: "up to {le}", Lt: "below {lt}"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A key, as a page of settings has it."""

    key: str
    kind: str
    default: str
    meaning: str
    when: str
    effect: str = ""

    @property
    def unit(self) -> str:
        """In brackets, or the noun that the meaning begins with; empty where it has none."""
        if named := UNIT.search(self.meaning):
            return named[1]
        begins = re.sub(r"^(most|passes over the) ", "", self.meaning)
        return next(
            (unit for unit in UNITS if begins.startswith(unit) or f", in {unit}" in begins), ""
        )


def run_settings() -> Iterator[tuple[str, list[Setting]]]:
    """The sections of conf/config.yaml."""
    for title, _, rows in sections(conf_dir() / "config.yaml"):
        yield (
            title,
            [_setting(row, RunConfig) for row in rows if not row[0].startswith("defaults.")],
        )


def group_settings(group: str) -> Iterator[tuple[str, str, list[Setting]]]:
    """Of each option of a group its name, what it is, and its settings."""
    for path in sorted((conf_dir() / group).glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        about = " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))
        content = {key: value for file in lineage(path) for key, value in read_yaml(file).items()}
        kind = GROUPS[group][content["name"]]
        yield path.stem, about, [_setting(row, kind) for row in rows_of(path)]


def launcher_settings(name: str) -> list[Setting]:
    """Those of hydra.launcher."""
    if name == "pool":
        source = (ROOT / "hydra_plugins" / "expt_pool_launcher.py").read_text(encoding="utf-8")
        found = re.findall(r"^    (\w+): ([\w| ]+) = (\S+)  # (.+)$", source, re.MULTILINE)
        rows = [(key, kind, yaml_value(default), meaning) for key, kind, default, meaning in found]
    else:
        lines = (
            (conf_dir() / "hydra" / "launcher" / f"{name}.yaml")
            .read_text(encoding="utf-8")
            .splitlines()
        )
        pairs = [(*left.split("=", 1), meaning) for left, meaning in keys_with_meaning(lines)]
        rows = [(key, "", default, meaning) for key, default, meaning in pairs if meaning]
    named = {
        "int": "integer",
        "float": "number",
        "bool": "`true` or `false`",
        "int | None": "integer or `null`",
    }
    whens = _described()["when"]
    parted = [(key, kind, default, meaning.partition(WHEN)) for key, kind, default, meaning in rows]
    return [
        Setting(key, named.get(kind, ""), default, meaning, when or whens.get(key, ""))
        for name, kind, default, (meaning, _, when) in parted
        for key in [f"hydra.launcher.{name}"]
    ]


def yaml_value(python: str) -> str:
    """A default as YAML has it."""
    return {"None": "null", "True": "true", "False": "false"}.get(python, python)


def own_settings(group: str) -> list[Setting]:
    """What a class of one's own may be given beside its own arguments; docs/own_settings.yaml says
    what it means.
    """
    own = GROUPS[group].get("_target_", object)
    return [
        _setting((f"{group}.{key}={one['default']}", one["meaning"]), own)
        for key, one in _described()["own"].get(group, {}).items()
    ]


def _setting(row: tuple[str, str], owner: type) -> Setting:
    (key, _, default), (meaning, _, when) = row[0].partition("="), row[1].partition(WHEN)
    kind = type_of(key if owner is RunConfig else key.partition(".")[2], owner)
    if default == "auto" and "auto" not in kind:
        kind = f"`auto`, or {kind}"
    return Setting(key, kind, default, meaning, when, effects_in_words(key))


_read: dict[str, Any] = {}


def _described() -> dict[str, Any]:
    if not _read:
        _read.update(yaml.safe_load(OWN.read_text(encoding="utf-8")))
    return _read


def type_of(key: str, owner: Any) -> str:
    """In words, of a dotted key of a dataclass."""
    first, _, rest = key.partition(".")
    hint = typing.get_type_hints(next(classes_in(owner)), include_extras=True)[first]
    return type_of(rest, hint) if rest else in_words(hint)


def in_words(hint: Any) -> str:
    """A type of the schema."""
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind is typing.Annotated:
        return (
            "a dotted name"
            if hint == DottedName
            else _limited(in_words(arguments[0]), arguments[1:])
        )
    if kind in (typing.Union, types.UnionType):
        return ", or ".join(in_words(one) for one in arguments)
    if kind is typing.Literal:
        return " or ".join(f"`{one}`" for one in arguments)
    if kind is tuple:
        inner = in_words(arguments[0])
        return (
            f"list (each: {inner})"
            if arguments[-1] is ...
            else f"list of {len(arguments)} (each: {inner})"
        )
    if kind is dict:
        return "mapping"
    if isinstance(hint, type) and issubclass(hint, Target):
        return "mapping with a `_target_`"
    if dataclasses.is_dataclass(hint):
        return "mapping of " + ", ".join(f"`{field.name}`" for field in dataclasses.fields(hint))
    named = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "`true` or `false`",
        type(None): "`null`",
    }
    return named[hint]


def _limited(words: str, constraints: Sequence[Any]) -> str:
    found = [
        each
        for one in constraints
        for each in (one.metadata if isinstance(one, FieldInfo) else [one])
    ]
    limits = [
        LIMITS[type(one)].format(**dataclasses.asdict(one)) for one in found if type(one) in LIMITS
    ]
    if any(isinstance(one, MinLen) for one in found):
        limits.append(
            f"of at least {next(one.min_length for one in found if isinstance(one, MinLen))}"
        )
    return " ".join([words, *limits])


FILLED = re.compile(r"<!-- settings: (.+?) -->.*?<!-- end -->", re.DOTALL)
FILLED_PAGES = ("dashboards", "data", "settings", "settings_groups")
PAGES = tuple(ROOT / "docs" / f"{name}.md" for name in FILLED_PAGES)


def filled(text: str) -> str:
    """Return a page with what is generated between its `<!-- settings: WHAT -->` and end."""
    return FILLED.sub(
        lambda found: (
            f"<!-- settings: {found[1]} -->\n\n{_wrapped(markdown(found[1]))}\n<!-- end -->"
        ),
        text,
    )


def _wrapped(text: str) -> str:
    """Return prose in lines of MAX_COLUMNS_OF_PAGES; a table's rows can't be wrapped."""
    wrapper = textwrap.TextWrapper(
        MAX_COLUMNS_OF_PAGES, break_long_words=False, break_on_hyphens=False
    )
    lines = (line if line.startswith("|") else wrapper.fill(line) for line in text.splitlines())
    return "\n".join(lines)


def markdown(what: str) -> str:
    """What stands in a page for `<!-- settings: WHAT -->`.

    That is `run`, a group, `choices GROUP` for what its choices are, `trackers`, or a launcher.
    """
    if what == "run":
        return "\n".join(f"## {title}\n\n{_items(found)}" for title, found in run_settings())
    if what.startswith("launcher "):
        return _items(launcher_settings(what.partition(" ")[2]))
    if what == "trackers":
        rows = (f"| `{name}` | {cls.__doc__} |" for name, cls in registry.trackers().items())
        return "\n".join(["| `send=` | |", "|---|---|", *rows]) + "\n"
    if what.startswith("choices "):
        return _choices(what.partition(" ")[2]) + "\n"
    return _of_group(what)


def _of_group(group: str) -> str:
    """Options in a table; then each key once, with the options that have it."""
    chosen = list(group_settings(group))
    names = [name for name, _, _ in chosen]
    merged: dict[str, list[tuple[str, Setting]]] = {}
    for name, _, found in chosen:
        for setting in found:
            merged.setdefault(setting.key, []).append((name, setting))
    own = own_settings(group)
    merged |= {one.key: [("a class of your own", one)] for one in own if one.key not in merged}
    return "\n".join([_choices(group), "", *(_merged(each, names) for each in merged.values())])


def _choices(group: str) -> str:
    """Options in a table."""
    rows = [f"| `{name}` | {about} |" for name, about, _ in group_settings(group)]
    return "\n".join([f"| `{group}=` | |", "|---|---|", *rows])


def _merged(each: list[tuple[str, Setting]], names: Sequence[str]) -> str:
    having = [name for name, _ in each]
    defaults = _by_value([(name, one.default) for name, one in each])
    default = " · ".join(
        f"`{value}`" + (f" ({', '.join(names)})" if len(defaults) > 1 else "")
        for value, names in defaults.items()
    )
    meanings = _by_value([(name, one.meaning) for name, one in each])
    meaning = " ".join(
        (f"*{', '.join(of)}:* " if len(meanings) > 1 else "") + _sentence(text, each[0][1].kind)
        for text, of in meanings.items()
    )
    kinds = " / ".join(_by_value([(name, one.kind) for name, one in each]))
    when = next((one.when for _, one in each if one.when), "")  # one option's YAML says it
    of = "" if having == list(names) else f" · **of** {', '.join(having)}"
    return _item(dataclasses.replace(each[0][1], when=when), kinds, default, meaning, of)


def _by_value(pairs: Sequence[tuple[str, str]]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in pairs:
        found.setdefault(value, []).append(name)
    return found


def _items(found: Sequence[Setting]) -> str:
    return "\n".join(
        _item(one, one.kind, f"`{one.default}`", _sentence(one.meaning, one.kind)) for one in found
    )


def _item(one: Setting, kind: str, default: str, meaning: str, of: str = "") -> str:
    unit = f" · **unit** {one.unit}" if one.unit else ""
    kind = f"**type** {kind} · " if kind else ""
    default = default.replace("`???`", "none: must be typed")
    when = f"\n\n**When:** {one.when}" if one.when else ""
    when += f"\n\n**On a change:** {one.effect}." if one.effect else ""
    return f"### `{one.key}`\n\n{kind}**default** {default}{unit}{of}\n\n{meaning}{when}\n"


def _sentence(meaning: str, kind: str = "") -> str:
    """Begun with a capital, but where it begins with a value; what Markdown would take for marks is
    left as it is.
    """
    text = re.sub(r"(?<!`)(\[\{.*?\}\]|\{\w+: .*?\}|_target_)(?!`)", r"`\1`", meaning)
    begins = re.split(r"[ ,:;]", text)[0]
    if not (f"`{begins}`" in kind or "." in begins):
        text = f"{text[:1].upper()}{text[1:]}"
    return text + ("" if text.endswith((".", "`")) else ".") if text else ""


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
