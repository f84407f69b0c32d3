"""What the environment held is kept out of what is written, whatever its length and whatever else holds it."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from expt.config import secrets
from expt.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_names", {})


def test_the_longest_secret_is_hidden_first() -> None:
    secrets.remember({"USER": "anna", "HOME": "/home/anna", "TOKEN": "anna-4711"})
    assert secrets.hidden("anna at /home/anna/x with anna-4711") == (
        "${oc.env:USER} at ${oc.env:HOME}/x with ${oc.env:TOKEN}"
    )


def test_what_stands_for_a_secret_is_not_searched_for_another() -> None:
    secrets.remember({"TOKEN": "abcdefgh", "OTHER": "TOKEN"})
    assert secrets.hidden("abcdefgh") == "${oc.env:TOKEN}"


def test_four_characters_are_a_secret_and_three_are_not() -> None:
    secrets.remember({"PIN": "4711", "AGE": "123"})
    assert secrets.hidden("4711 123") == "${oc.env:PIN} 123"


def test_a_secret_may_hold_any_character() -> None:
    secrets.remember({"A": "a.c|(", "B": "\\n[x]"})
    assert secrets.hidden("a.c|( abc| \\n[x]") == "${oc.env:A} abc| ${oc.env:B}"


def test_containers_are_searched_and_keep_their_types() -> None:
    secrets.remember({"A": "secret"})
    assert secrets.hidden({"a": ["secret", 3, ("x secret", None)]}) == {
        "a": ["${oc.env:A}", 3, ("x ${oc.env:A}", None)]
    }


def test_those_beside_are_hidden_this_once() -> None:
    assert secrets.hidden("secret pin", {"A": "secret", "B": "pin"}) == "${oc.env:A} pin"
    assert secrets.hidden("secret") == "secret"


def test_what_was_hidden_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPT_TEST_A", "today's")
    read: dict[str, str] = {}
    assert secrets.restored({"a": ["${oc.env:EXPT_TEST_A}/x", 3]}, read) == {"a": ["today's/x", 3]}
    assert read == {"EXPT_TEST_A": "today's"}
    monkeypatch.delenv("EXPT_TEST_A")
    with pytest.raises(ConfigError, match=r"^EXPT_TEST_A: the run took this variable from the environment"):
        secrets.restored("${oc.env:EXPT_TEST_A}", read)


def test_variables_that_interpolations_read_are_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPT_TEST_A", "secret")
    monkeypatch.setenv("EXPT_TEST_B", "not read")
    content = OmegaConf.create({"a": "${oc.env:EXPT_TEST_A}", "b": "${oc.env:EXPT_TEST_C,default}"})
    with secrets.environment_read() as read:
        assert OmegaConf.to_container(content, resolve=True) == {"a": "secret", "b": "default"}
    assert read == {"EXPT_TEST_A": "secret"}
    assert secrets.hidden("secret, not read, default") == "${oc.env:EXPT_TEST_A}, not read, default"


def test_they_are_secrets_where_reading_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPT_TEST_A", "secret")
    content = OmegaConf.create({"a": "${oc.env:EXPT_TEST_A}", "b": "${oc.env:EXPT_TEST_MISSING}"})
    with pytest.raises(InterpolationResolutionError), secrets.environment_read():
        OmegaConf.to_container(content, resolve=True)
    assert secrets.hidden("secret") == "${oc.env:EXPT_TEST_A}"
