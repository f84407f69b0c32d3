"""A person's own class: found, checked before it is called, and built."""

import collections
import re
from pathlib import Path

import pytest

from expt.config import secrets, user_class
from expt.config.user_class import build, resolve, taken
from expt.errors import ConfigError
from tests.facade import Patch


class Own(collections.OrderedDict[str, int]):
    """Counts how often it was built."""

    built = 0

    def __init__(self, *, size: int) -> None:
        super().__init__(size=size)
        Own.built += 1


def not_a_class() -> None:
    raise AssertionError("this must never be called")


def test_a_subclass_is_built_with_its_arguments() -> None:
    assert resolve(f"{__name__}.Own", dict) is Own
    assert build(f"{__name__}.Own", dict, size=3) == {"size": 3}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("no_such_module.Own", r"^_target_=no_such_module.Own: cannot import no_such_module"),
        (f"{__name__}.Owm", r"has no Owm\. Did you mean 'Own'\?"),
        (f"{__name__}.not_a_class", "refused, it is not a subclass of builtins.dict$"),
        (f"{__name__}.Path", "refused, it is not a subclass of builtins.dict$"),
        ("os.system", "refused, it is not a subclass of builtins.dict$"),
    ],
)
def test_what_is_no_such_class_is_refused_and_not_called(path: str, text: str) -> None:
    assert issubclass(Path, object)
    with pytest.raises(ConfigError, match=text):
        build(path, dict, "touch /nowhere")


@pytest.mark.parametrize(
    ("given", "says"),
    [({"siz": 3}, "'siz'. Did you mean 'size'?"), ({},
        "missing 1 required keyword-only argument: 'size'")],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_named(given: dict[str, int], says: str) -> None:
    before = Own.built
    with pytest.raises(ConfigError) as refused:
        build(f"{__name__}.Own", dict, **given)
    assert str(refused.value).endswith(says)
    assert Own.built == before


RAISES = """
class Net(dict):
    def __init__(self, width, inner=None):
        self.width = 3 * width + 1
        if width == 4:
            open("/nowhere/it/is")
        if width == 5:
            said = "DefaultCPUAllocator: can't allocate memory"
            raise RuntimeError(f"{said}: you tried to allocate 400 bytes")
"""


def test_what_a_constructor_raises_is_told_with_what_it_was_given(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "own_constructor.py").write_text(RAISES)
    monkeypatch.syspath_prepend(tmp_path)
    name, where = ("own_constructor.Net", f"({tmp_path}/own_constructor.py, line 4)")
    for wrong, told in (
        ("abc", 'TypeError: can only concatenate str (not "int") to str'),
        ([], "TypeError: can only"),
    ):
        with pytest.raises(ConfigError) as refused:
            build(name, dict, width=wrong)
        assert str(refused.value).startswith(
            f"_target_={name}: cannot be built as Net(width={wrong!r}): {told}"
        )
        assert str(refused.value).endswith(where)
    with pytest.raises(ConfigError, match=r"Net\(width=4\): FileNotFoundError: .*, line 6\)"):
        build(f"{__name__}.Holder", dict, below=[{"_target_": name, "width": 4}])
    with pytest.raises(RuntimeError, match="allocate"):
        build(name, dict, width=5)
    monkeypatch.setattr(secrets, "_texts", {"a-rather-long-secret-0815-4711": "${oc.env:TOKEN}"})
    with pytest.raises(
        ConfigError, match=r"Net\(width='\$\{oc\.env:TOKEN\}'\)"
    ):  # and none of it where it is cut
        build(name, dict, width="a-rather-long-secret-0815-4711")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (b"import os\nclass Net(:\n    pass\n", "{file}, line 2: invalid syntax"),
        (b"x = 1\0", "own_raises.*null"),
        (
            b"import os\n\nraise RuntimeError('no licence\\nask for one')",
            r"importing own_raises raised RuntimeError: no licence \({file}, line 3\)",
        ),
        (
            b"\n\nimport no_such_module",
            "importing .*ModuleNotFoundError: No module named 'no_such_module' .*, line 3",
        ),
        (b"\nimport json\njson.loads('')", r"JSONDecodeError: Expecting .* \({file}, line 3\)"),
        (b"import sys\n\nsys.exit(3)", r"SystemExit: 3 \({file}, line 3\)"),
    ],
)
def test_what_is_wrong_with_its_module_is_named_with_the_line(
    tmp_path: Path, monkeypatch: Patch, source: bytes, told: str
) -> None:
    (file := tmp_path / "own_raises.py").write_bytes(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"^_target_=own_raises.Net: ") as refused:
        build("own_raises.Net", dict)
    assert re.search(told.format(file=file), str(refused.value))
    assert "None" not in str(refused.value)
    assert "\n" not in str(refused.value)


class Noted:
    """Notes what it was built with."""

    made: list[str] = []

    def __init__(self, *, label: str, inner: object = None) -> None:
        Noted.made.append(label)
        self.label, self.inner = label, inner


def noted(label: str, **more: object) -> dict[str, object]:
    return {"_target_": f"{__name__}.Noted", "label": label, **more}


class Holder(dict[str, object]):
    """A class with any arguments."""

    def __init__(self, **given: object) -> None:
        super().__init__(given)


def test_what_arguments_name_is_built_before_the_class_itself() -> None:
    Noted.made.clear()
    deep = {
        "several": [noted("a", inner=noted("b")), 3],
        "below": {"one": noted("c")},
        "plain": [1, {"x": None}],
    }
    held = build(f"{__name__}.Holder", dict, **deep)
    assert Noted.made == ["b", "a", "c"]
    first, second = held["several"]
    assert first.label == "a"
    assert first.inner.label == "b"
    assert second == 3
    assert held["below"]["one"].label == "c"
    assert held["plain"] == [1, {"x": None}]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            "subprocess.Popen",
            "refused, it is of Python's own library; name a class of a package, or your own",
        ),
        ("os.system", "refused, it is of Python's own library"),
        ("builtins.eval", "refused, it is of Python's own library"),
        ("ctypes.CDLL", "refused, it is of Python's own library"),
        (f"{__name__}.Path", "refused, it is of Python's own library"),
        (f"{__name__}.not_a_class", "refused, it is not a class"),
        ("torch.load", "refused, it is not a class"),
        (f"{__name__}.Notet", "has no Notet. Did you mean 'Noted'?"),
        ("Noted", "name a class, e.g. _target_: torchvision.transforms.v2.RandAugment"),
    ],
)
def test_nothing_is_called_where_one_of_them_is_refused(wrong: object, says: str) -> None:
    Noted.made.clear()
    with pytest.raises(ConfigError) as refused:
        build(
            f"{__name__}.Holder",
            dict,
            first=noted("a"),
            last=[noted("b", inner={"_target_": wrong})],
        )
    assert str(refused.value).startswith(
        f"_target_={wrong}: {says}" if "has no" not in says else f"_target_={wrong}: "
    )
    assert says in str(refused.value)
    assert Noted.made == []


def test_a_constructor_gets_what_it_names() -> None:
    offered = {"size": 3, "channels": 1}
    assert taken(Own, offered) == {"size": 3}
    assert taken(Holder, offered) == offered, "it takes any"


class Odd:
    """With names of arguments that `build` has too, and a `__new__` that takes anything."""

    def __new__(cls, *_: object, **__: object) -> "Odd":
        return super().__new__(cls)

    def __init__(self, path: str, base: int, *, said: str = "") -> None:
        self.given = (path, base)
        if said:
            raise ValueError(said)


def test_an_argument_may_have_any_name_and_init_says_what_is_taken() -> None:
    assert build(f"{__name__}.Odd", Odd, path="here", base=2).given == ("here", 2)
    assert user_class.taken(Odd, {"path": "here", "channels": 3}) == {"path": "here"}
    with pytest.raises(ConfigError, match="Did you mean 'path'"):
        build(f"{__name__}.Odd", object, pth="here", base=2)


def test_of_what_a_constructor_says_the_first_line_is_told_without_secrets(
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(secrets, "_texts", {"first\nsecond": "${oc.env:TOKEN}"})
    for given, told in (
        ("\n  no text  \nmore", "ValueError: no text "),
        ("of first\nsecond", "of ${oc.env:TOKEN} "),
    ):
        with pytest.raises(ConfigError) as refused:
            build(f"{__name__}.Odd", object, path="here", base=2, said=given)
        assert told in str(refused.value)
        assert "\n" not in str(refused.value).partition("): ")[2]
    assert secrets.said(ValueError()) == "ValueError"
