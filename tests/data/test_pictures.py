"""A picture is what a viewer shows, with its mask, wherever it is read; refusals name the file."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from expt.data.build import warn_of_absent
from expt.data.checked_samples import read_all
from expt.data.checksums import Checksums
from expt.data.folders import files_below, left_out, parts_there
from expt.data.images import MaskPictures, Pictures
from expt.data.kinds import Opening
from expt.data.kinds.image_folder import list_pairs
from expt.data.pictures import (
    in_mode,
    look,
    look_at,
    look_at_pair,
    open_picture,
    picture_suffixes,
    report_found,
)
from expt.errors import DataError
from expt.features import Mask
from expt.worker.build import build_data
from tests.conftest import Configured
from tests.facade import Capture
from tests.worker.conftest import ALONE

PIXELS = np.random.default_rng(0).integers(0, 255, (6, 9, 3), dtype=np.uint8)
HIDDEN = np.where(np.arange(6)[:, None] < 3, 255, 0).astype(np.uint8).repeat(9, 1)


def save(path: Path, pixels: np.ndarray, orientation: int | None = None) -> str:
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, exif=exif, lossless=True)
    return str(path)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_a_picture_lies_as_its_orientation_says(tmp_path: Path, suffix: str) -> None:
    for orientation in range(1, 9):
        path = save(tmp_path / f"{orientation}.{suffix}", PIXELS, orientation)
        with Image.open(path) as opened:
            expected = np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
        once = open_picture(path)
        for found in (once, open_picture(once, "RGB"), open_picture(path, "RGB")):
            assert np.array_equal(np.asarray(found.image), expected)
        assert ("turned" in look(path, "RGB").notes) == (orientation > 1 and suffix != "tif")


def test_16_bits_are_turned_too_damaged_metadata_ignored_and_floats_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "16.png", PIXELS[..., 0].astype(np.uint16) * 257, 6)
    assert np.array_equal(np.asarray(open_picture(path, "L").image), np.rot90(PIXELS[..., 0], -1))
    Image.fromarray(PIXELS).save(tmp_path / "bad.png", exif=b"Exif\0\0nothing")
    assert np.array_equal(np.asarray(open_picture(tmp_path / "bad.png", "RGB").image), PIXELS)
    Image.fromarray(PIXELS[..., 0].astype(np.float32) / 255).save(tmp_path / "float.tif")
    with pytest.raises(DataError, match=r"float\.tif cannot be read as an image"):
        open_picture(tmp_path / "float.tif", "RGB")


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_what_is_transparent_lies_on_white(tmp_path: Path, mode: str) -> None:
    expected = np.asarray(Image.fromarray(PIXELS).convert(mode))
    for name, alpha in (("some", HIDDEN), ("none", np.full_like(HIDDEN, 255))):
        rgba = Image.fromarray(np.dstack([PIXELS, alpha]))
        for file in (f"{name}.png", f"{name}.webp"):
            rgba.save(tmp_path / file, lossless=True)
            found = np.asarray(open_picture(tmp_path / file, mode).image)
            assert np.array_equal(found[alpha > 0], expected[alpha > 0])
            assert (found[alpha == 0] == 255).all()
            assert ("transparent" in look(str(tmp_path / file), mode).notes) == (name == "some")
    palette = Image.fromarray(np.dstack([PIXELS, HIDDEN])).quantize(64)
    palette.save(tmp_path / "palette.png")
    assert (np.asarray(open_picture(tmp_path / "palette.png", mode).image)[3:] == 255).all()
    grey = Image.fromarray(PIXELS[..., 0])
    deep = Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257)
    for picture, key in ((grey, int(PIXELS[0, 0, 0])), (deep, int(PIXELS[0, 0, 0]) * 257)):
        picture.save(tmp_path / "key.png", transparency=key)
        opened = open_picture(tmp_path / "key.png", mode).image
        found = np.asarray(opened).reshape(6, 9, -1)[..., 0]
        assert np.array_equal(
            found, np.where(PIXELS[..., 0] == PIXELS[0, 0, 0], 255, PIXELS[..., 0])
        )


def test_ones_own_picture_stays_as_it_is() -> None:
    """Also where its transparent colour has 16 bits."""
    picture = Image.fromarray(PIXELS)
    picture.info["transparency"] = tuple(int(value) << 8 for value in PIXELS[0, 0])
    before = dict(picture.info)
    for _ in range(2):
        assert np.asarray(in_mode(picture, "RGB"))[0, 0].tolist() == [255] * 3
    assert picture.info == before


@pytest.mark.parametrize("suffix", ["tif", "gif", "webp", "png", "jpg"])
def test_the_first_frame_is_taken_and_frames_are_counted(tmp_path: Path, suffix: str) -> None:
    frames, path = (
        [Image.fromarray(PIXELS), Image.fromarray(255 - PIXELS)],
        f"{tmp_path}/2.{suffix}",
    )
    frames[0].save(
        path,
        save_all=True,
        append_images=frames[1:],
        **({"format": "MPO"} if suffix == "jpg" else {}),
    )
    picture = look(path, "RGB")
    first = np.asarray(open_picture(path, "RGB").image)
    assert np.abs(first.astype(int) - PIXELS).mean() < 60
    assert "frames" in picture.notes


@pytest.mark.parametrize("orientation", [3, 6])
@pytest.mark.parametrize("with_image", [False, True])
def test_a_mask_lies_as_its_image(tmp_path: Path, orientation: int, with_image: bool) -> None:
    """A mask as large as its image lies in its file is turned with it."""
    image = save(tmp_path / "image.png", PIXELS, orientation)
    shown = np.asarray(open_picture(image, "RGB").image)
    lying, upright = (each[..., 0] // 128 for each in (PIXELS, shown))
    turned = with_image and orientation > 4
    mask = save(tmp_path / "mask.png", lying if turned else upright)
    values = Mask(num_classes=2)
    sets = MaskPictures(pairs=[(image, mask)], channels=3, size=None, values=values)
    pixels, numbers = sets[0]
    assert torch.equal(numbers, (pixels[0] // 128).long())
    said = look_at_pair(image, mask, "RGB", values).notes
    assert ("turned" in said, "masks" in said) == (True, turned)
    assert ("kept" in said) == (orientation == 3)


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_jpeg_is_decoded_at_the_size_that_is_needed(tmp_path: Path, orientation: int) -> None:
    """Its mask, and whoever asks for its size, see the size of the file."""
    smooth = np.indices((120, 200)).sum(0).astype(np.uint8)
    path = save(tmp_path / "a.jpg", np.dstack([smooth] * 3), orientation)
    whole = open_picture(path, "RGB").image
    needed = (30, 50) if orientation == 1 else (50, 30)
    found = open_picture(path, "RGB", needed=needed)
    assert found.image.size == needed[::-1]
    assert found.size == look(path, "RGB").size == whole.size
    pixels = [np.asarray(each.resize(needed[::-1])).astype(int) for each in (found.image, whole)]
    assert np.abs(pixels[0] - pixels[1]).mean() < 2
    assert open_picture(path, needed=(61, 61)).image.size == whole.size, "less would not do"
    mask = save(tmp_path / "a.png", np.asarray(whole)[..., 0] // 128)
    values, how = Mask(num_classes=2), {"channels": 3, "size": needed, "needed": needed}
    image, numbers = MaskPictures(pairs=[(path, mask)], values=values, **how)[0]  # type: ignore[arg-type]
    assert image.shape[1:] == numbers.shape == needed


def test_a_damaged_file_is_found_by_its_end(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.png"):
        path = Path(save(tmp_path / name, PIXELS.repeat(20, 0).repeat(20, 1)))
        look(str(path), "RGB")
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(DataError, match=name):
            look(str(path), "RGB")


def test_masks_of_different_palettes_are_reported(tmp_path: Path, capsys: Capture) -> None:
    """Their numbers are the classes, whatever the colours."""
    image, pairs = save(tmp_path / "image.png", PIXELS), list[tuple[str, str]]()
    for name, palette in (("one", [0, 0, 0, 9, 9, 9]), ("other", [9, 9, 9, 0, 0, 0])):
        mask = Image.fromarray(PIXELS[..., 0] // 128).convert("P")
        mask.putpalette(palette)
        mask.save(tmp_path / f"{name}.png")
        pairs.append((image, str(tmp_path / f"{name}.png")))
    for chosen in (pairs[:1], pairs):
        with Checksums.below(tmp_path) as sums:
            look = functools.partial(look_at_pair, mode="L", values=None)
            report_found("all", look_at(sums, "now", chosen, look, threads=1))
        assert ("palette" in capsys.readouterr().err) == (len(chosen) == 2)


def test_pictures_whose_content_is_not_known_are_looked_at_each_for_itself(tmp_path: Path) -> None:
    """The disk may have failed once: no note is kept, and each counts as it is."""
    paths = [save(tmp_path / f"{at}.png", PIXELS, at) for at in (1, 3, 6, 1)]

    def unknown(path: str) -> str:
        raise DataError(path)

    for _ in range(2):
        with Checksums.below(tmp_path) as sums:
            see = functools.partial(look, mode="RGB")
            samples = [(path,) for path in paths]
            assert look_at(sums, "now", samples, see, threads=1, key=unknown) == {"turned": 2}


def test_a_file_that_has_changed_is_refused_each_time_that_it_is_read(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", PIXELS)
    with Checksums.below(tmp_path) as sums:
        sums.of(path)
        save(tmp_path / "a.png", PIXELS[::-1])
        for _ in range(2):
            with pytest.raises(DataError, match="has changed"):
                sums.refuse_changed(path)


def test_everything_wrong_with_a_pair_is_named(tmp_path: Path) -> None:
    bad = str(tmp_path / "a.png"), str(tmp_path / "b.png")
    for path in bad:
        Path(path).write_bytes(b"no")
    with pytest.raises(DataError) as wrong:
        look_at_pair(*bad, "RGB", None)
    assert [problem.split()[0] for problem in wrong.value.problems] == [*bad]
    image, mask = save(tmp_path / "c.png", PIXELS), save(tmp_path / "d.png", PIXELS[..., 0])
    with pytest.raises(DataError, match=mask):
        look_at_pair(image, mask, "RGB", Mask(num_classes=2))


def test_a_stream_is_read_as_its_file(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", PIXELS, 6)
    with open(path, "rb") as file:
        pictures = Pictures([(path, 0), (file, 1)], 3, None)
        assert torch.equal(pictures[0][0], pictures[1][0])


def test_what_pillow_opens_is_a_picture() -> None:
    assert {".jpg", ".jfif", ".gif", ".avif", ".tga", ".jp2"} <= {*picture_suffixes()}
    assert not {".h5", ".mpg", ".pdf", ".eps", ".txt", ""} & {*picture_suffixes()}


def test_what_is_left_out_is_counted_by_suffix(tmp_path: Path) -> None:
    hidden = (".hidden", ".folder/d.png", "__MACOSX/e.png")
    for name in ("a.PNG", "b.txt", "c.TXT", "Makefile", *hidden):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    every = files_below(tmp_path)
    assert files_below(tmp_path, picture_suffixes()) == [str(tmp_path / "a.PNG")]
    assert left_out(every, [str(tmp_path / "a.PNG")]) == (
        "3 (.txt 2, no suffix 1), 75.0% of the files, such as Makefile"
    )
    assert left_out(["1.c", "1.a", "1.b"], []) == (
        "3 (.a 1, .b 1, .c 1), 100.0% of the files, such as 1.a"
    )
    assert "JPEG or PNG" in left_out(["1.HEIC", "1.a"], [])


def test_parts_are_chosen_by_name(tmp_path: Path) -> None:
    assert parts_there(tmp_path) == {"train": tmp_path}
    for name in ("Valid", "train", "TEST", "other"):
        (tmp_path / name).mkdir()
    found = {part: path.name for part, path in parts_there(tmp_path).items()}
    assert found == {"train": "train", "val": "Valid", "test": "TEST"}
    (tmp_path / "train" / "Training").mkdir()
    assert parts_there(tmp_path / "train") == {"train": tmp_path / "train" / "Training"}
    (tmp_path / "train" / "Training").rmdir()
    assert [*parts_there(tmp_path, ("train", "test"))] == ["train", "test"]
    (tmp_path / "TEST").rmdir()
    (tmp_path / "Valid").rmdir()
    assert parts_there(tmp_path) == {"train": tmp_path}, "a class of vehicles"
    (tmp_path / "train" / "cat").mkdir()
    with pytest.raises(DataError, match=r"dataset\.splits"):
        parts_there(tmp_path, ("train", "test"))


VALUES = Mask(num_classes=3)


def write(path: Path, values: np.ndarray, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(values)
    (image.convert(mode) if mode else image).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four images of 6x4, in subfolders too; masks are stripes of the classes 0, 1, 2 and of what
    is ignored.
    """
    mask = np.repeat(np.array([[0, 1, 2, 255]], np.uint8), 6, 0)
    for name in ("a", "b", "town/c", "town/d"):
        write(tmp_path / "train" / "images" / f"{name}.jpg", np.full((6, 4, 3), 100, np.uint8))
        write(tmp_path / "train" / "masks" / f"{name}.png", mask)
    return tmp_path


def stripes(root: Path, size: tuple[int, int] = (6, 4)) -> MaskPictures:
    return MaskPictures(pairs=list_pairs(root / "train"), channels=3, size=size, values=VALUES)


def test_images_and_masks_of_a_stem_belong_together_and_are_resized(root: Path) -> None:
    pairs = list_pairs(root / "train")
    assert [Path(mask).stem for _, mask in pairs] == ["a", "b", "c", "d"]
    image, mask = stripes(root, (3, 8))[2]
    assert (image.shape, image.dtype, mask.dtype) == ((3, 3, 8), torch.uint8, torch.int64)
    assert mask.tolist() == [[0, 0, 1, 1, 2, 2, 255, 255]] * 3, (
        "the nearest pixel: no class between two"
    )


def test_masks_may_be_palettes_and_of_one_and_sixteen_bits(root: Path) -> None:
    masks = root / "train" / "masks"
    palette = Image.fromarray(np.tile(np.array([[2, 1]], np.uint8), (6, 2)), mode="L").convert("P")
    palette.putdata([2, 1] * 12)
    palette.save(masks / "a.png")
    write(masks / "b.png", np.ones((6, 4), bool))
    write(masks / "town" / "c.png", np.full((6, 4), 2, np.uint16))
    found = [stripes(root)[index][1].unique().tolist() for index in range(3)]
    assert found == [[1, 2], [1], [2]]
    big_endian = Image.fromarray(np.full((6, 4), 1, ">u2"))
    big_endian.save(masks / "town" / "c.png", format="TIFF")
    assert stripes(root)[2][1].unique().tolist() == [1]


def _remove(path: str) -> Callable[[Path], None]:
    return lambda root: (root / path).unlink()


def _mask(values: np.ndarray) -> Callable[[Path], None]:
    return lambda root: write(root / "train" / "masks" / "b.png", values)


def _jpeg_mask(root: Path) -> None:
    (root / "train" / "masks" / "b.png").unlink()
    write(root / "train" / "masks" / "b.jpeg", np.full((6, 4), 9, np.uint8))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_remove("train/masks/b.png"), "images/b.jpg has no mask .*train/masks/b.png"),
        (_remove("train/images/town/c.jpg"), "masks/town/c.png has no image in .*train/images"),
        (_mask(np.zeros((6, 5), np.uint8)), "masks/b.png is 6x5, and its image 6x4"),
        (_mask(np.full((6, 4), 3, np.uint8)), r"masks/b.png holds the class 3, expected 0 to 2"),
        (_jpeg_mask, r"masks/b.jpeg holds the class .* PNG"),
        (_mask(np.zeros((6, 4, 3), np.uint8)), "masks/b.png is a picture of mode RGB"),
        (lambda root: (root / "train/masks/b.png").write_text("no"), "masks/b.png cannot be read"),
        (
            lambda root: write(root / "train/images/b.png", np.zeros((6, 4), np.uint8)),
            "b.jpg and .*b.png have one name",
        ),
        (lambda root: (root / "test").mkdir(), "no pictures in .*test/images: expected NAME.jpg"),
    ],
)
def test_what_is_wrong_is_told_by_its_file(
    spoil: Callable[[Path], None], told: str, root: Path
) -> None:
    spoil(root)

    def read() -> None:
        for part in parts_there(root).values():
            list_pairs(part)
        stripes(root)[1]

    with pytest.raises(DataError, match=told):
        read()


def test_a_persons_own_samples_are_checked() -> None:
    image, mask = torch.zeros(3, 2, 2), torch.tensor([[0, 1], [2, 255]])
    wrong = [(image, mask), (image, mask + 2), (image, mask.float()), (image, mask[0]), image]
    assert torch.equal(read_all(wrong, VALUES.check, [0])[0][1], mask)  # type: ignore[arg-type]
    told = (
        "sample 1: .* holds the class 3, expected 0 to 2",
        "float32",
        r"int64 \[2\], expected",
        "is a Tensor, exp",
    )
    for index, text in enumerate(told, 1):
        with pytest.raises(DataError, match=text):
            read_all(wrong, VALUES.check, [index])  # type: ignore[arg-type]


WORDS = ("task=segmentation", "dataset=segmentation_folder", "model=unet", "dataset.num_classes=3")


def test_a_class_in_no_mask_of_train_is_reported(
    root: Path, configured: Configured, capsys: Capture
) -> None:
    """Masks of 0 and 255, and a class that only held-out masks have."""
    config = configured(*WORDS, f"dataset.root={root}")
    source = config.dataset.open(Opening(config.task, torch.device("cpu"), 0))
    warn_of_absent(config.dataset, source, torch.arange(4))
    assert capsys.readouterr().err == ""
    for name in ("a", "b", "town/c"):
        write(root / "train/masks" / f"{name}.png", np.tile(np.array([[0, 255]], np.uint8), (6, 2)))
    for number, absent in ((4, []), (3, ["1", "2"])):
        train = torch.arange(number)
        found = source.features.targets.absent(lambda: source.known_targets(train))  # noqa: B023
        assert found == absent
    warn_of_absent(config.dataset, source, torch.arange(3))
    assert "task.ignore_index" in capsys.readouterr().err


def test_a_changed_mask_is_another_experiment(root: Path, configured: Configured) -> None:
    dataset = configured(*WORDS, f"dataset.root={root}").dataset
    before = dataset.fingerprint()
    write(root / "train" / "masks" / "a.png", np.ones((6, 4), np.uint8))
    assert dataset.fingerprint() != before


def test_an_example_is_like_a_sample(root: Path, configured: Configured) -> None:
    data = build_data(configured(*WORDS, f"dataset.root={root}", "batch_size=1"), ALONE)
    batch = next(iter(data.train.epoch(1)))
    for example, samples in zip(data.example, (batch.inputs, batch.targets), strict=True):
        assert example.shape == samples.shape[1:]
    assert data.example[1].dtype == torch.int64
