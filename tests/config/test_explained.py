"""A value of another type: where it came from, and how it is written."""

import re

import pytest

from expt.errors import ConfigError
from tests.conftest import Configured
from tests.facade import Patch

WRITTEN = {
    'optimizer.lr="0.01"': "write optimizer.lr=0.01",
    "drop_last=on": "write drop_last=true",
    "drop_last=No": "write drop_last=false",
    "amp=yes": "write amp=true",
    "batch_size=010": "write batch_size=10",
    "epochs=1e1": "write epochs=10",
    'gpus="0"': "write gpus=0",
    "optimizer.lr=[0.1,0.2]": "write -m optimizer.lr=0.1,0.2",
    "model.hidden=[-1]": None,
    "model.hidden=[64,x]": "'x' is a text",
    "model.hidden=['64','32']": "'64' is a text",
    'model.hidden="[32]"': "'[32]' is a text",
    "optimizer.lr=1/10": None,
    "max_steps=None": "'None' is a text; write max_steps=null",
    "max_steps='null'": "write max_steps=null",
    "epochs=none": None,
    'epochs="${oc.decode:${oc.env:N,two}}"': "it came from ${oc.decode:${oc.env:N,two}}",
    "epochs=1.5": None,
    "epochs=[a,b]": None,
    "epochs=[1,1.5]": None,
    "max_steps=[1,null]": "write -m max_steps=1,null",
    "epochs=0": None,
    "optimizer.lr=${seed}": "it came from ${seed}",
    "optimizer.lr=1e-${oc.env:ONE}": "write 'optimizer.lr=\"${oc.decode:1e-${oc.env:ONE}}\"'",
    "optimizer.lr=${oc.env:LR}": "write 'optimizer.lr=\"${oc.decode:${oc.env:LR}}\"'",
    "model.hidden=32": None,
    "model.hidden=${oc.env:LISTED}": "write 'model.hidden=\"${oc.decode:${oc.env:LISTED}}\"'",
    "epochs=${oc.env:SEVERAL}": "it came from ${oc.env:SEVERAL}",
    "epochs=${oc.env:EMPTY}": "it came from ${oc.env:EMPTY}",
    "max_steps=${oc.env:NONE}": "write 'max_steps=\"${oc.decode:${oc.env:NONE}}\"'",
    "drop_last=${oc.env:X,on}": "write 'drop_last=\"${oc.decode:${oc.env:X,on}}\"', with true",
}


@pytest.mark.parametrize("word", WRITTEN)
def test_a_value_of_another_type_says_how_it_is_written(
    word: str, configured: Configured, monkeypatch: Patch
) -> None:
    for name, value in {
        "LR": "0.01", "SEVERAL": "0.1,0.2", "LISTED": "[0.1, 0.2]", "EMPTY": "", "NONE": "null",
        "ONE": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    key, fix = word.partition("=")[0], WRITTEN[word]
    with pytest.raises(ConfigError, match=f"^{re.escape(key)}=") as raised:
        configured(word)
    (line,) = raised.value.problems
    assert line.endswith(f"; {fix}") if fix and fix.startswith("it") else str(fix or "") in line
    assert ("write" in line) == ("write" in str(fix))


def test_a_variable_is_a_number_where_it_is_decoded(
    configured: Configured, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("LR", "0.01")
    assert configured('optimizer.lr="${oc.decode:${oc.env:LR}}"').optimizer.lr == 0.01
    monkeypatch.setenv("LR", "3")
    assert configured('optimizer.lr="${oc.decode:1e-${oc.env:LR}}"').optimizer.lr == 0.001


@pytest.mark.parametrize(
    ("word", "meant"), [("+optimzer.x=3", "optimizer"), ("+lr=3", "optimizer.lr")]
)
def test_a_new_key_is_a_known_one_misspelt_first(
    word: str, meant: str, configured: Configured
) -> None:
    with pytest.raises(ConfigError, match=f"no such key. Did you mean '{meant}'"):
        configured(word)


def test_a_misspelt_key_hides_no_problem_of_the_one_it_stands_for(configured: Configured) -> None:
    with pytest.raises(ConfigError) as raised:
        configured("optimizer=sgd", "optimizer.momentum=2", "+optimizer.momentun=0.9")
    assert [each.partition(":")[0] for each in raised.value.problems] == [
        "optimizer.momentum=2",
        "optimizer.momentun=0.9",
    ]


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("objective=f1/val", "+task.metrics.f1=max"),
        ("early_stop={metric: rmsle/val, patience: 3}", "'+task.metrics.rmsle={_target_: "),
        ("objective=acuracy/val", "'accuracy/val'"),
        ("objective=f1/vall", "one of"),
    ],
)
def test_a_metric_that_is_not_measured_is_added(
    word: str, fix: str, configured: Configured
) -> None:
    with pytest.raises(ConfigError, match=re.escape(fix)) as raised:
        configured(word)
    assert ("Or measure it" in str(raised.value)) == fix.lstrip("'").startswith("+")


def test_a_number_as_a_key_is_named(configured: Configured) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer\.5=null: there is no such key"):
        configured("+optimizer={5: null}")
    with pytest.raises(ConfigError, match=r"there is no key 'optimizer\.5'"):
        configured("optimizer={lr: 1, 5: null}")
