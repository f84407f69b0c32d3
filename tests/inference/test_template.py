"""`expt predict --template`: predictions in the columns and the order of another file."""

import csv
import shutil
from pathlib import Path

import pytest

import expt
from expt.command import predict
from expt.errors import ConfigError, DataError, ExptError
from tests.conftest import Configured
from tests.facade import Capture
from tests.inference.conftest import CLASSES, SHORT, Made, Make


def filled(made: Made, given: Path, lines: str, *more: str) -> list[list[str]]:
    """The rows that are written for a template of these lines."""
    template = given.parent / "template.csv"
    template.write_text(lines)
    out = given.parent / "filled.csv"
    out.unlink(missing_ok=True)
    words = [made.folder, given, "--template", template, "--output", out, *more]
    assert predict.main([*map(str, words)]) == 0
    assert template.read_text() == lines
    return [*csv.reader(out.read_text().splitlines())]


@pytest.fixture
def new(photos: Made, tmp_path: Path) -> Path:
    (tmp_path / "new").mkdir()
    for place, name in enumerate(CLASSES):
        for number in range(2):
            source = photos.data / "test" / name / f"{number}.png"
            shutil.copy(source, tmp_path / "new" / f"p{2 * place + number}.png")
    return tmp_path / "new"


def test_pictures_fill_a_template_by_their_names(photos: Made, new: Path, capsys: Capture) -> None:
    found = {Path(str(one["path"])).stem: one for one in expt.predict(photos.folder, new)}
    names = [*found["p0"]["probabilities"]]
    ids = ["p3", "p0", "gone", "p1"]
    rows = filled(photos, new, "id,label\n" + "".join(f"{x},{names[0]}\n" for x in ids))
    assert rows[0] == ["id", "label"]
    assert rows[1:] == [[x, found[x]["class"] if x in found else ""] for x in ids]
    shown = capsys.readouterr()
    assert "gone" in shown.err
    assert "p2.png" in shown.err
    assert "filled       label by class\n" in shown.out
    rows = filled(photos, new, "label;x/id\n" + "".join(f"1;a/{x}.png\n" for x in ids[:2]))
    assert rows[0] == ["label;x/id"]
    assert [row[0].split(";")[0] for row in rows[1:]] == [
        str(names.index(found[x]["class"])) for x in ids[:2]
    ]
    assert "filled       label by the class's number\n" in capsys.readouterr().out
    _, *rows = filled(photos, new, "id,target\np0,0.5\np2.png,0.5\n")
    assert [float(row[1]) for row in rows] == [
        found[x]["probabilities"][names[1]] for x in ("p0", "p2")
    ]
    rows = filled(photos, new, f"{names[1]},id,{names[0]}\n0,p1,1\n")
    assert [float(rows[1][0]), float(rows[1][2])] == [
        found["p1"]["probabilities"][name] for name in names[::-1]
    ]


@pytest.fixture(scope="session")
def listed_photos(
    make: Make, configured: Configured, photos: Made, tmp_path_factory: pytest.TempPathFactory
) -> Made:
    """The same pictures by a list of kinds."""
    path = tmp_path_factory.mktemp("listed") / "list.csv"
    names = [f"train/{name}/{number}.png" for name in CLASSES for number in range(4)]
    path.write_text("\n".join(["file,kind", *(f"{x},k{len(x)}" for x in names)]))
    words = ("dataset=image_folder", f"dataset.root='{photos.data}'", f"dataset.labels={path}")
    chosen = ("dataset.image_size=[12,16]", "batch_size=2", "model=mlp", "model.hidden=[5]")
    return make("listed", configured(*SHORT, *words, *chosen), photos.data)


def test_ids_are_not_taken_for_examples_that_name_a_picture(photos: Made, new: Path) -> None:
    (new / "p2.png").rename(new / "0.png")
    rows = filled(photos, new, "label,id\n0,p0\n0,p1\n0,gone\n")
    assert [row[1] for row in rows] == ["id", "p0", "p1", "gone"]
    for lines in ("label,id\n0,x0\n0,x1\n", "id,label\np0,0\np0,1\n"):
        with pytest.raises(DataError, match=r"rows 1 and 2 both name (0|p0)\.png"):
            filled(photos, new, lines)


def test_the_template_itself_is_not_written_over(photos: Made, new: Path) -> None:
    (new.parent / "filled.csv").symlink_to("template.csv")
    words = [str(photos.folder), str(new), "--template", str(new.parent / "template.csv")]
    (new.parent / "template.csv").write_text("id,label\np0,cat\n")
    for name in ("template.csv", "filled.csv"):
        with pytest.raises(ConfigError, match="is one of the files that are read"):
            predict.main([*words, "--output", str(new.parent / name), "--force"])


def test_a_target_is_no_id(listed_photos: Made, new: Path) -> None:
    (new / "p2.png").rename(new / "0.png")
    with pytest.raises(ConfigError, match="no column names the pictures"):
        filled(listed_photos, new, "kind,id\n0,x0\n")


def test_rows_of_a_table_fill_a_template_by_their_ids(patients: Made, tmp_path: Path) -> None:
    header, *lines = patients.data.read_text().splitlines()[:5]
    table = [f"{header},no", *(f"{line},h{x}" for x, line in enumerate(lines))]
    (tmp_path / "new.csv").write_text("\n".join(table))
    found = {
        one["no"]: one["progression"] for one in expt.predict(patients.folder, tmp_path / "new.csv")
    }
    rows = filled(patients, tmp_path / "new.csv", "no,value\nh3,0\nh1,0\n")
    assert [[x, float(y)] for x, y in rows[1:]] == [[x, found[x]] for x in ("h3", "h1")]


def test_what_no_prediction_fills_stays_as_it_is(
    patients: Made, listed_photos: Made, new: Path, tmp_path: Path
) -> None:
    header, *lines = patients.data.read_text().splitlines()[:3]
    table = [f"{header},no", *(f"{line},h{x}" for x, line in enumerate(lines))]
    (tmp_path / "new.csv").write_text("\n".join(table))
    for more, cells in (("city", "Ulm"), ("city,note", "Ulm,7")):
        text = f"no,progression,{more}\nh1,0,{cells}\n"
        _, row = filled(patients, tmp_path / "new.csv", text)
        assert [row[0], *row[2:]] == ["h1", *cells.split(",")]
        assert float(row[1]) > 1
    _, row = filled(listed_photos, new, "id,kind,Usage\np0,k1,Public\n")
    assert (row[0], row[1] in ("k0", "k1"), row[2]) == ("p0", False, "Public")
    assert row[1].startswith("k")
    with pytest.raises(ConfigError, match=r"nothing fills .*wrong"):  # a class, maybe
        filled(listed_photos, new, f"id,{row[1]},wrong,wrong too\np0,0.5,0.5,0.5\n")


def test_ids_and_origins_are_no_predictions(patients: Made, tmp_path: Path) -> None:
    header, *lines = patients.data.read_text().splitlines()[:3]
    table = [
        f"{header},no,city",
        *(f"{line},{x},Ulm" for line, x in zip(lines, ["NA", "b"], strict=True)),
    ]
    given = tmp_path / "new.csv"
    given.write_text("\n".join(table))
    found = {one["no"]: one["progression"] for one in expt.predict(patients.folder, given)}
    assert [*found] == ["NA", "b"]
    _, *rows = filled(patients, given, "row,path,no,city,progression\n2,x,NA,null,0\n1,y,b,,0\n")
    assert [row[:4] for row in rows] == [["2", "x", "NA", "null"], ["1", "y", "b", ""]]
    assert [float(row[4]) for row in rows] == [*found.values()]
    with pytest.raises(ConfigError, match="has no column but no"):
        filled(patients, given, "no\nb\n")


@pytest.mark.parametrize("names", [("row",), ("target",), ("target", "path")])
def test_targets_may_be_called_as_an_origin_is(
    names: tuple[str, ...], make: Make, configured: Configured, tmp_path: Path
) -> None:
    data, given = tmp_path / "t.csv", tmp_path / "new.csv"
    lines = [",".join(map(str, (x % 7, *(3 * (x % 7) + 20 for _ in names)))) for x in range(40)]
    data.write_text("\n".join([",".join(["a", *names]), *lines]))
    words = ("task=regression", "dataset=table", f"dataset.path={data}", "dataset.features=[a]")
    targets = f"dataset.targets=[{','.join(names)}]"
    made = make("-".join(names), configured(*SHORT, *words, targets, "model.hidden=[5]"), data)
    given.write_text("id,a\nx,1\ny,5\n")
    found = expt.predict(made.folder, given)
    rows = filled(made, given, f"id,{','.join(names)}\ny{',0' * len(names)}\n")
    expected = [found[1][f"{name} predicted"] for name in names]
    assert rows[1] == ["y", *map(str, expected)]
    if len(names) > 1:
        with pytest.raises(ConfigError, match="nothing fills Path"):
            filled(made, given, "id,target,Path\ny,0,0\n")


@pytest.fixture(scope="session")
def grades(make: Make, configured: Configured, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Rows of the classes 3 and 5."""
    path = tmp_path_factory.mktemp("grades") / "t.csv"
    lines = [f"w{x},{x % 7},{x / 2},{3 + x % 2 * 2},1,{x % 2}" for x in range(60)]
    path.write_text("\n".join(["no,a,b,grade,odd,even", *lines]))
    words = ("dataset=table", f"dataset.path={path}", "dataset.features=[a,b]", "model.hidden=[5]")
    return make("grades", configured(*SHORT, *words, "dataset.targets=grade"), path)


@pytest.mark.slow
def test_classes_that_are_numbers_are_written_as_they_are(grades: Made, tmp_path: Path) -> None:
    given = tmp_path / "new.csv"
    shutil.copy(grades.data, given)
    found = {one["no"]: one for one in expt.predict(grades.folder, given)}
    for example in ("0", "1", "5", ""):
        rows = filled(grades, given, f"no,x\nw3,{example}\nw8,{example}\n")
        assert rows[1:] == [[x, found[x]["class"]] for x in ("w3", "w8")]
        assert {row[1] for row in rows[1:]} <= {"3", "5"}
    rows = filled(grades, given, "no,x\nw3,0.5\n")
    assert float(rows[1][1]) == found["w3"]["probabilities"]["5"]
    with pytest.raises(ConfigError, match="nothing fills x"):
        filled(grades, given, "no,x\nw3,0.5\n", "--top", "1")


def test_rows_of_one_id_have_one_prediction(grades: Made, tmp_path: Path) -> None:
    given, lines = tmp_path / "new.csv", "no,a,b\nw1,1,2\nw2,3,4\nw1,1,2\n"
    given.write_text(lines)
    assert len(filled(grades, given, "no,3\nw1,0\nw2,0\n")) == 3
    given.write_text(f"{lines}w2,3,40\n")
    with pytest.raises(ConfigError, match=r"several rows have the no 'w2'.*put it first"):
        filled(grades, given, "no,3\nw1,0\nw2,0\n")


@pytest.fixture(scope="session")
def labelled(make: Make, configured: Configured, grades: Made) -> Made:
    """Rows that have all labels."""
    words = ("dataset=table", f"dataset.path={grades.data}", "dataset.features=[a,b]")
    chosen = ("task=multilabel", "task.threshold=1e-9", "dataset.targets=[odd,even]")
    return make("labelled", configured(*SHORT, *words, *chosen, "model.hidden=[5]"), grades.data)


@pytest.mark.parametrize(
    ("example", "sign"), [("odd even", " "), ("odd|x even", "|"), ("odd", ";"), ("", ";")]
)
def test_labels_are_written_with_the_sign_of_the_template(
    labelled: Made, tmp_path: Path, example: str, sign: str
) -> None:
    given = tmp_path / "new.csv"
    given.write_text("no,a,b\nw1,1,2\n")
    for name in ("tags", "labels"):
        rows = filled(labelled, given, f"no,{name}\nw1,{example}\n")
        assert rows == [["no", name], ["w1", f"odd{sign}even"]]


@pytest.mark.parametrize("name", ["row", "path", "class", "p_3"])
def test_ids_are_those_of_the_table_whatever_their_column_is_called(
    grades: Made, tmp_path: Path, name: str
) -> None:
    cells = [f"{7 - x},{x % 7},{x / 2}" for x in range(8)]
    (tmp_path / "new.csv").write_text("\n".join([f"{name},a,b", *cells]))
    found = {
        str(one[f"table.{name}"]): str(one["class"])
        for one in expt.predict(grades.folder, tmp_path / "new.csv")
    }
    rows = filled(grades, tmp_path / "new.csv", f"{name},grade\n1,3\n7,3\n0,3\n")
    assert rows[1:] == [[x, found[x]] for x in ("1", "7", "0")]
    for lines, message in (("01,3\n07,3\n", "has none of the ids"), ("", "has no rows")):
        with pytest.raises(ConfigError, match=message):
            filled(grades, tmp_path / "new.csv", f"{name},grade\n{lines}")


@pytest.mark.parametrize("name", ["no", "more"])
def test_a_single_column_is_a_prediction_whatever_its_name(
    grades: Made, tmp_path: Path, name: str
) -> None:
    lines = [f"w{x},{x % 7},{x / 2},0.25" for x in range(4)]
    (tmp_path / "new.csv").write_text("\n".join(["id,a,b,more", *lines]))
    found = expt.predict(grades.folder, tmp_path / "new.csv")
    rows = filled(grades, tmp_path / "new.csv", f"id,{name}\nw0,0.5\nw1,0.5\nw2,0.5\n")
    wanted = [one["probabilities"]["5"] for one in found][:3]
    assert [float(row[1]) for row in rows[1:]] == wanted


def test_a_probability_of_two_classes_is_that_of_the_second(photos: Made, new: Path) -> None:
    found = {Path(str(one["path"])).stem: one for one in expt.predict(photos.folder, new)}
    first, second = found["p0"]["probabilities"]
    assert first in {one["class"] for one in found.values()}
    _, *rows = filled(photos, new, "id,probability\n" + "".join(f"{x},0\n" for x in found))
    assert [float(row[1]) for row in rows] == [
        found[row[0]]["probabilities"][second] for row in rows
    ]


@pytest.mark.parametrize("example", ["0,00", "-1.234,5", "0.00", "1", ""])
def test_numbers_have_the_decimal_sign_of_the_templates(
    patients: Made, tmp_path: Path, example: str
) -> None:
    header, line = patients.data.read_text().splitlines()[:2]
    (tmp_path / "new.csv").write_text(f"{header},no\n{line},h0\n")
    (found,) = expt.predict(patients.folder, tmp_path / "new.csv")
    rows = filled(patients, tmp_path / "new.csv", f"no;value\nh0;{example}\n")
    sign = "," if "," in example else "."
    assert ",".join(rows[1]) == f"h0;{found['progression']}".replace(".", sign)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("name,label\nx,1\n", "no column names the pictures"),
        ("id,label,more\np1,1,2\n", "nothing fills label, more"),
    ],
)
def test_templates_that_do_not_fit_are_refused(
    photos: Made, new: Path, lines: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        filled(photos, new, lines)
    assert not (new.parent / "filled.csv").exists()


def test_nothing_is_overwritten(photos: Made, new: Path) -> None:
    (new.parent / "t.csv").write_text("id,label\np1,1\n")
    words = [str(photos.folder), str(new), "--template", str(new.parent / "t.csv")]
    for more in ([], ["--output", str(new.parent / "t.csv")]):
        with pytest.raises(ExptError):
            predict.main([*words, *more])
    with pytest.raises(ConfigError, match="--template"):
        predict.main([str(photos.folder), "--split", "test", *words[2:], "--output", "x.csv"])
