"""The pages of settings: nothing of the schema is left out."""

import dataclasses
import functools
from pathlib import Path

import pytest

from expt.config.groups import GROUPS
from expt.config.schema import RunConfig
from scripts.documents import settings
from scripts.documents.settings import Setting

INTERNAL = {"name", "target", "kwargs", "secrets", "following"}
"""Fields that nobody types."""


@functools.cache
def documented() -> tuple[Setting, ...]:
    found = [setting for _, each in settings.run_settings() for setting in each]
    for group in GROUPS:
        found += [setting for _, _, each in settings.group_settings(group) for setting in each]
        found += settings.own_settings(group)
    return (
        *found,
        *settings.launcher_settings("pool"),
        *settings.launcher_settings("submitit_slurm"),
    )


def test_each_setting_has_a_meaning_and_a_default() -> None:
    for setting in documented():
        assert setting.meaning, setting.key
        assert setting.default, setting.key
        assert setting.kind or setting.key.startswith("hydra.launcher."), setting.key


def test_no_line_of_when_is_about_what_is_not_there() -> None:
    assert set(settings._described()["when"]) <= {setting.key for setting in documented()}


def test_each_key_of_the_schema_is_documented() -> None:
    keys = {setting.key for setting in documented()}
    for field in dataclasses.fields(RunConfig):
        nested = {key for key in keys if key.startswith(f"{field.name}.")}
        assert field.name in {*keys, *GROUPS, *INTERNAL} or nested, field.name
        if dataclasses.is_dataclass(field.type):
            assert {
                f"{field.name}.{below.name}" for below in dataclasses.fields(field.type)
            } == nested


@pytest.mark.parametrize("group", GROUPS)
def test_each_key_of_a_group_is_documented(group: str) -> None:
    keys = {
        setting.key.split(".")[1] for setting in documented() if setting.key.startswith(f"{group}.")
    }
    for kind in GROUPS[group].values():
        assert {field.name for field in dataclasses.fields(kind)} - INTERNAL <= keys


@pytest.mark.parametrize("page", settings.PAGES, ids=lambda page: page.stem)
def test_a_page_in_the_checkout_is_what_is_generated(page: Path) -> None:
    assert settings.filled(text := page.read_text(encoding="utf-8")) == text, "scripts/lint"
