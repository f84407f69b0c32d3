"""What the environment held is kept out of what is written, and found again where it is used."""

import json
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from expt.command.compose import settings_of
from expt.config import secrets
from expt.errors import ConfigError
from tests.facade import Patch


@pytest.fixture(autouse=True)
def _environment(monkeypatch: Patch) -> None:
    monkeypatch.setattr(secrets, "_texts", {})
    for name, value in (
        ("A", "secret-4711"),
        ("HOME", "/home/anna"),
        ("PIN", "47"),
        ("QUOTED", 'it\'s\n"x"'),
        ("WORD", "loss"),
        ("RATE", "0.01"),
    ):
        monkeypatch.setenv(f"EXPT_{name}", value)  # fmt: skip
    monkeypatch.setenv("EXPT_LOGIN", "{user: anna-1, pins: [1234567]}")


def composed(**content: Any) -> tuple[dict[str, Any], dict[str, str]]:
    settings = settings_of(OmegaConf.create(content))
    return settings, settings.pop("secrets")


NODES = {
    "token": "${oc.env:EXPT_A}",
    "uri": "https://${oc.env:EXPT_A}@host",
    "number": "${oc.decode:${oc.env:EXPT_PIN}}",
    "login": "${oc.decode:${oc.env:EXPT_LOGIN}}",
    "list": ["${oc.env:EXPT_HOME}/x", 3],
}


def test_settings_are_hidden_and_restored() -> None:
    settings, found = composed(model={**NODES, "alias": "${model.uri}", "pin": 47})
    model = settings["model"]
    assert (model["uri"], model["number"]) == ("https://secret-4711@host", 47)
    written = {"model": {"target": "a.B", "kwargs": model}}
    hidden = secrets.hidden(written, found)
    assert hidden["model"]["kwargs"] == {**NODES, "alias": NODES["uri"], "pin": 47}
    assert secrets.restored(hidden) == written


def test_texts_are_hidden_wherever_they_are_written() -> None:
    composed(model={**NODES, "quoted": "${oc.env:EXPT_QUOTED}"})
    quoted = 'it\'s\n"x"'
    text = f"secret-4711, anna-1, /home/anna/x, {quoted}, {quoted!r}, {json.dumps(quoted)}"
    hidden = secrets.hidden([text])[0]
    assert not {word for word in ("4711", "anna", "it's", '"x') if word in hidden}
    assert secrets.hidden("47 and 1234567") == "47 and 1234567", "short ones are in other numbers"
    assert secrets.said(ValueError("secret-4711\nmore")) == "ValueError: ${oc.env:EXPT_A}"


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:EXPT_A,${oc.env:EXPT_HOME,x}}",
        "${oc.env:EXPT_A,${b}}",
        "${oc.env:'EXPT_A'}",
        "${oc.env:EXPT_${c}}",
        "${oc.env:${oc.env:EXPT_MISSING,EXPT_A}}",
    ],
)
def test_a_variable_is_found_however_it_is_written(text: str) -> None:
    settings, found = composed(a=text, b="digits", c="A")
    assert "secret-4711" not in str(secrets.hidden(settings, found))
    assert "secret-4711" not in secrets.hidden("it is secret-4711")


def test_a_record_keeps_its_own_words() -> None:
    keys = {name: f"${{oc.env:EXPT_{name}}}" for name in ("WORD", "RATE", "A")}
    other = {"loss/val": 1, "best": {"metric": "loss/val"}, "typed": ["lr=0.0125"]}
    settings, found = composed(**keys, **other)
    assert secrets.hidden(settings, found) == {**keys, **other}
    assert secrets.hidden({"loss": "secret-4711"}) == {"loss": keys["A"]}
    assert secrets.hidden("the key loss is refused") == f"the key {keys['WORD']} is refused"


def test_a_default_of_a_composed_variable_stays_in_other_places() -> None:
    text = "${oc.env:${oc.env:EXPT_WORD}_METRIC,accuracy-1}"
    settings, found = composed(a=text, b="accuracy-1/val")
    assert secrets.hidden(settings, found) == {"a": text, "b": "accuracy-1/val"}


def test_what_depends_on_other_keys_keeps_them() -> None:
    settings, found = composed(a="${oc.env:EXPT_A}/${b}", b="digits")
    assert secrets.hidden(settings, found) == {"a": "${oc.env:EXPT_A}/digits", "b": "digits"}


def test_a_default_is_no_secret() -> None:
    assert composed(a="${oc.env:EXPT_MISSING,default}") == ({"a": "default"}, {})


def test_secrets_are_known_where_another_variable_is_missing() -> None:
    with pytest.raises(InterpolationResolutionError):
        composed(a="${oc.env:EXPT_A}", b="${oc.env:EXPT_MISSING}")
    assert secrets.hidden("secret-4711") == "${oc.env:EXPT_A}"


def test_a_variable_that_is_gone_is_named(monkeypatch: Patch) -> None:
    monkeypatch.delenv("EXPT_A")
    with pytest.raises(ConfigError, match="EXPT_A"):
        secrets.restored({"a": ["${oc.env:EXPT_A}/x"]})
    left = {"a": ["${oc.env:EXPT_A}/x"]}
    assert secrets.restored(left, all_of_them=False) == left, "a model needs no path of its data"


def test_a_key_that_refers_to_a_secret_holds_it_too(monkeypatch: Patch) -> None:
    monkeypatch.setenv("EXPT_WORD", "hunter")
    model: dict[str, Any] = {
        "token": "${oc.env:EXPT_WORD}",
        "note": "${model.token}",
        "loss": "hunter/val",
    }
    model |= {"deep": {"k": ["x ${model.token}", "y"]}, "url": "https://u:${model.note}@h"}
    settings, found = composed(model=model)
    hidden = secrets.hidden(settings, found)
    assert "hunter" not in str({**hidden["model"], "loss": ""})
    assert hidden["model"]["loss"] == "hunter/val"
    assert secrets.restored(hidden) == settings
    for token in ("hf_xY7kQ9zPqRtVbNm", "a1b2c3d4", "Xy12Zw34"):
        monkeypatch.setenv("EXPT_A", token)
        composed(a="${oc.env:EXPT_A}")
        assert token not in str(secrets.hidden({"other": f"of {token}"}))


def test_a_key_that_refers_to_others_has_their_values_in_a_record() -> None:
    model = {
        "name": "table", "act": "ReLU", "size": 3,
        "path": "${oc.env:EXPT_PIN}/${model.name}.csv",
        "default": "${oc.env:EXPT_NONE,${model.act}}",
        "which": "${oc.env:EXPT_${model.word}}", "word": "A",
        "login": "${oc.decode:${oc.env:EXPT_LOGIN}}", "again": "${model.login}",
        "open": "${model.name}-${model.act}", "far": "${model.path}", "number": "${model.size}",
    }  # fmt: skip
    settings, found = composed(model=model)
    hidden = secrets.hidden(settings, found)
    expected = {
        **settings["model"],
        "path": "${oc.env:EXPT_PIN}/table.csv",
        "far": "${oc.env:EXPT_PIN}/table.csv",
        "which": "${oc.env:EXPT_A}",
        **dict.fromkeys(("login", "again"), "${oc.decode:${oc.env:EXPT_LOGIN}}"),
    }
    assert hidden["model"] == expected
    assert secrets.restored(hidden) == settings
