"""What the environment held is kept out of what is written, whatever its length and whatever else
holds it.
"""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from expt.config import secrets
from expt.config.parse import plain
from expt.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_names", {})


def test_the_longest_secret_is_hidden_first() -> None:
    secrets.remember({"USER": "anna", "HOME": "/home/anna", "TOKEN": "anna-4711"})
    assert (
        secrets.hidden("anna at /home/anna/x with anna-4711")
        == "${oc.env:USER} at ${oc.env:HOME}/x with ${oc.env:TOKEN}"
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


@pytest.mark.parametrize("secret", ["line 1\nline 2", "it's", 'a "word"', "back\\slash", "schön"])
def test_a_secret_is_found_as_python_and_json_write_it(secret: str) -> None:
    secrets.remember({"A": secret})
    for text in (secret, repr(secret), json.dumps(secret), f"KeyError: {secret!r}"):
        assert secret.split()[-1].strip("'\"") not in secrets.hidden(text)
        assert "${oc.env:A}" in secrets.hidden(text)


def test_keys_that_a_resolver_makes_of_a_variable_are_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EXPT_TEST_A", "{token-4711: [anna], b: {other-4712: 1}}")
    node = "${oc.decode:${oc.env:EXPT_TEST_A}}"
    content = plain(OmegaConf.create({"model": {"users": node}}))
    read = content.pop("secrets")
    assert "token-4711" in content["model"]["users"]
    assert secrets.hidden_settings(content, read) == {"model": {"users": node}}
    hidden = str(secrets.hidden({"given": content["model"]["users"], "text": "'other-4712'"}))
    assert not {word for word in ("token", "4711", "4712", "anna") if word in hidden}


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
    with pytest.raises(
        ConfigError, match=r"^EXPT_TEST_A: the run took this variable from the environment"
    ):
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


NESTED = {
    "token": "${oc.decode:${oc.env:EXPT_TEST_QUOTED}}",
    "number": "${oc.decode:${oc.env:EXPT_TEST_MILLIONS}}",
    "login": "${oc.decode:${oc.env:EXPT_TEST_LOGIN}}",
    "deep": "x-${expt_upper:${oc.decode:'${oc.env:EXPT_TEST_WORD}'}}",
    "alias": "${model.deep}",
    "plain": "https://${oc.env:EXPT_TEST_WORD}@host",
    "alias_of_plain": "${model.plain}",
    "short": "${oc.decode:${oc.env:EXPT_TEST_SHORT}}",
}


def test_what_other_resolvers_make_of_a_variable_is_hidden_too_and_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = {
        "QUOTED": "'secret-4711'",
        "MILLIONS": "47_110_815",
        "WORD": "hello",
        "SHORT": "0.1",
    }
    variables["LOGIN"] = "{user: anna, pins: [1234567, ab]}"
    for name, value in variables.items():
        monkeypatch.setenv(f"EXPT_TEST_{name}", value)
    OmegaConf.register_new_resolver("expt_upper", str.upper, replace=True)
    content = plain(
        OmegaConf.create({"model": NESTED, "optimizer": {"lr": 47110815, "seed": 1234567}})
    )
    read = content.pop("secrets")
    values, login = content["model"], "${oc.decode:${oc.env:EXPT_TEST_LOGIN}}"
    assert (values["token"], values["number"], values["deep"]) == (
        "secret-4711",
        47110815,
        "x-HELLO",
    )
    hidden = {
        **NESTED,
        "login": login,
        "alias": NESTED["deep"],
        "alias_of_plain": NESTED["plain"],
        "short": 0.1,
    }
    written = {"model": {"kwargs": values}, "optimizer": content["optimizer"]}
    assert secrets.hidden_settings(written, read) == {
        **written,
        "model": {"kwargs": hidden},
    }, "and no other number"
    other = {"model": {"kwargs": {"login": {**values["login"], "more": 1}}}}
    by_parts = {"user": f"{login}[user]", "pins": [f"{login}[pins][0]", "ab"]}
    assert secrets.hidden_settings(other, read) == {
        "model": {"kwargs": {"login": {**by_parts, "more": 1}}}
    }
    assert secrets.restored(by_parts, {}) == values["login"]
    again: dict[str, str] = {}
    assert secrets.restored({"model": {"kwargs": hidden}}, again) == {"model": {"kwargs": values}}
    assert secrets.hidden_settings(written, again) == secrets.hidden_settings(written, read)
    text = "refused: secret-4711, anna, x-HELLO, 47110815, hello"
    assert not any(word in secrets.hidden(text) for word in text.replace(",", "").split()[1:])
    monkeypatch.setenv("EXPT_TEST_LOGIN", "{user: otto}")
    with pytest.raises(
        ConfigError,
        match=r"\[pins\]\[0\]: cannot be made of the environment anew .*; type the key again",
    ):
        secrets.restored(by_parts, {})
    monkeypatch.delenv("EXPT_TEST_LOGIN")
    with pytest.raises(ConfigError, match=r"^EXPT_TEST_LOGIN: the run took this variable"):
        secrets.restored(hidden, {})


def test_what_says_nothing_outside_of_its_configuration_is_hidden_and_not_made_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EXPT_TEST_WORD", "hello")
    OmegaConf.register_new_resolver("expt_upper", str.upper, replace=True)
    node = {"a": "${oc.env:EXPT_TEST_WORD}", "b": "${expt_upper:${model.a}}"}
    content = plain(OmegaConf.create({"model": node}))
    hidden = secrets.hidden_settings(content, content["secrets"])["model"]
    assert hidden == {"a": node["a"], "b": "${made_of:${oc.env:EXPT_TEST_WORD}}"}
    with pytest.raises(ConfigError, match="type the key again"):
        secrets.restored(hidden, {})
