"""What is searched: the values of each parameter, and what a record says of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expt.search.space import Parameter, Space, as_key

PARAMETERS = (
    Parameter("lr", "float", 1e-4, 1.0, log=True),
    Parameter("decay", "float", 0.0, 0.5),
    Parameter("drop", "float", 0.0, 0.9, step=0.3),
    Parameter("width", "int", 8, 64),
    Parameter("size", "int", 16, 128, step=16),
    Parameter("depth", "int", 1, 32, log=True),
    Parameter(
        "hidden", "categorical", choices=("[16]", "[32,32]", "null"), meant=([16], [32, 32], None)
    ),
)


@given(st.floats(0, 1, exclude_max=True), st.sampled_from(PARAMETERS))
def test_every_value_is_one_that_is_read_again(share: float, parameter: Parameter) -> None:
    value = parameter.at(share)
    meant = parameter.meant[parameter.choices.index(str(value))] if parameter.choices else value
    assert parameter.read(meant) == value
    if not parameter.choices:
        assert parameter.low <= float(value) <= parameter.high
        assert 0 <= parameter.share(value) <= 1


def test_a_number_is_no_boolean() -> None:
    """In Python 1 is True."""
    flag = Parameter("flag", "categorical", choices=("null", "1", "true"), meant=(None, 1, True))
    expected = ["null", "1", "true", None, None, None]
    assert [flag.read(value) for value in (None, 1, True, False, 0, "1")] == expected


def test_a_float_has_no_more_digits_than_anybody_reads() -> None:
    assert PARAMETERS[0].rounded(0.012345678) == 0.012346
    assert PARAMETERS[0].rounded(1.0000001) == 1.0
    assert PARAMETERS[0].word(0.00001234) == "lr=1.234e-05"


@pytest.mark.parametrize(
    ("low", "high"), [(0.99990, 0.99999), (1.0, 1.00001), (-1000.001, -1000.0)]
)
def test_a_narrow_interval_has_as_many_values_as_others(low: float, high: float) -> None:
    parameter = Parameter("momentum", "float", low, high)
    assert len({parameter.at(index / 500) for index in range(500)}) == 500


@pytest.mark.parametrize(
    "parameter",
    [PARAMETERS[2], PARAMETERS[3], PARAMETERS[4], Parameter("two", "float", 0, 0.1, step=0.1)],
)
def test_a_value_of_several_is_told_as_the_middle_of_its_share(parameter: Parameter) -> None:
    """An end would pull the mean of CMA-ES, and widen its steps, for nothing."""
    every = parameter.all()
    assert every is not None
    shares = [(index + 0.5) / len(every) for index in range(len(every))]
    assert [parameter.share(value) for value in every] == pytest.approx(shares)
    assert [parameter.at(share) for share in shares] == every


def test_a_number_on_a_step_is_read_as_what_is_typed_for_it() -> None:
    """As those of a grid, of which Hydra adds up the steps."""
    parameter = Parameter("momentum", "float", 0.7, 0.9, step=0.1)
    assert [parameter.read(value) for value in (0.7, 0.7 + 0.1, 0.7 + 0.1 + 0.1, 0.85, 1.0)] == [
        0.7, 0.8, 0.9, None, None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "found"),
    [(0, 2.0), (0, True), (0, "a"), (2, 0.31), (3, 8.5), (4, 17), (6, [8]), (6, "null")],
)
def test_what_lies_outside_is_no_value(place: int, found: object) -> None:
    assert PARAMETERS[place].read(found) is None


def test_a_conditional_parameter_is_read_where_its_condition_holds() -> None:
    model = Parameter("model", "categorical", choices=("mlp", "convnet"), meant=("mlp", "convnet"))
    space = Space((model, Parameter("pool", "int", 1, 4, when=("model", "convnet"))))
    records: list[dict[str, object]] = [
        {"model": "mlp", "pool": 3},
        {"model": "convnet", "pool": 3},
        {"model": "convnet"},
        {"pool": 3},
    ]
    expected = [{"model": "mlp"}, {"model": "convnet", "pool": 3}, None, None]
    assert [space.read(record.get) for record in records] == expected
    assert space.words({"model": "convnet", "pool": 3}) == ["model=convnet", "pool=3"]
    left = space.without([{"model": "mlp"}, {"model": "convnet", "pool": 2}])
    assert left == [{"model": "convnet", "pool": pool} for pool in (1, 3, 4)]


def test_corners_have_each_end_and_each_choice_below_conditions_too() -> None:
    def choice(name: str, *choices: str, when: tuple[str, str] | None = None) -> Parameter:
        return Parameter(name, "categorical", choices=choices, meant=choices, when=when)

    space = Space((
        choice("model", "mlp", "convnet", "vit"),
        choice("batch_size", "64", "7000", when=("model", "mlp")),
        Parameter("lr", "float", 1e-3, 1.0, log=True),
        choice("pool", "a", "b", "c", "d", when=("model", "vit")),
        Parameter("width", "int", 1, 9, when=("pool", "c")),
        Parameter("width", "int", 20, 30, when=("model", "convnet")),
    ))  # fmt: skip
    corners = space.corners()
    for name, values in {
        "model": {"mlp", "convnet", "vit"},
        "batch_size": {"64", "7000"},
        "pool": {*"abcd"},
        "width": {1, 9, 20, 30},
    }.items():
        assert {point.get(name) for point in corners} - {None} >= values, name
    assert all(space.read(point.get) == point for point in corners)
    assert len(corners) == len({as_key(point) for point in corners}) <= 12
    plain = Space((choice("model", "mlp", "convnet"), Parameter("lr", "float", 1e-3, 1.0)))
    assert len(plain.corners()) == 2


def test_a_space_of_numbers_has_no_end() -> None:
    assert Space(PARAMETERS[:1]).without([]) is None
    assert PARAMETERS[2].all() == [0.0, 0.3, 0.6, 0.9]
    assert math.prod(len(each.all() or "") for each in PARAMETERS[3:6]) == 57 * 8 * 32


def test_ranges_of_one_key_below_different_choices_are_one_key_of_a_point() -> None:
    kind = Parameter("kind", "categorical", choices=("a", "b"), meant=("a", "b"))
    low, high = (
        Parameter("x", "int", n, n + 1, when=("kind", name)) for n, name in ((1, "a"), (7, "b"))
    )
    space = Space((kind, low, high))
    assert space.words({"kind": "a", "x": 1}) == ["kind=a", "x=1"]
    assert space.read({"kind": "a", "x": 7}.get) is None, "a value of the other choice"
    left = space.without([{"kind": "a", "x": 1}])
    assert left is not None
    assert len(left) == 1 + 2
