"""torchvision's datasets by the names of their classes there: what they hold, and what may be
chosen of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

SetName: TypeAlias = Literal[
    "CIFAR10",
    "CIFAR100",
    "CLEVRClassification",
    "Caltech101",
    "Caltech256",
    "CelebA",
    "Cityscapes",
    "Country211",
    "DTD",
    "EMNIST",
    "EuroSAT",
    "FER2013",
    "FGVCAircraft",
    "FashionMNIST",
    "Flowers102",
    "Food101",
    "GTSRB",
    "INaturalist",
    "Imagenette",
    "KMNIST",
    "LFWPeople",
    "LSUN",
    "MNIST",
    "Omniglot",
    "OxfordIIITPet",
    "PCAM",
    "Places365",
    "QMNIST",
    "RenderedSST2",
    "SBDataset",
    "SEMEION",
    "STL10",
    "SUN397",
    "SVHN",
    "StanfordCars",
    "USPS",
    "VOCSegmentation",
]
MASK_SETS = {"Cityscapes": 19, "OxfordIIITPet": 3, "SBDataset": 21, "VOCSegmentation": 21}
"""Those that have a mask for each image, and the number of its classes."""
_BOXES, _CAPTIONS = "boxes", "captions"
_FLOW, _PAIRS, _STEREO, _VIDEOS = (
    "optical flow",
    "pairs of images",
    "pairs of images with disparities",
    "videos",
)
OTHER_SETS = {
    **dict.fromkeys(("CocoDetection", "Kitti", "VOCDetection", "WIDERFace"), _BOXES),
    **dict.fromkeys(("CocoCaptions", "Flickr30k", "Flickr8k", "SBU"), _CAPTIONS),
    **dict.fromkeys(("FlyingChairs", "FlyingThings3D", "HD1K", "KittiFlow", "Sintel"), _FLOW),
    **dict.fromkeys(("LFWPairs", "PhotoTour"), _PAIRS),
    **dict.fromkeys(
        ("CREStereo", "CarlaStereo", "ETH3DStereo", "FallingThingsStereo", "InStereo2k"), _STEREO
    ),
    **dict.fromkeys(("Kitti2012Stereo", "Kitti2015Stereo", "Middlebury2014Stereo"), _STEREO),
    **dict.fromkeys(("SceneFlowStereo", "SintelStereo"), _STEREO),
    **dict.fromkeys(("HMDB51", "Kinetics", "MovingMNIST", "UCF101"), _VIDEOS),
    "LSUNClass": "images without targets",
}
"""Those of which no task knows what to do with their targets, and what these are."""
INSTEAD = {
    "DatasetFolder": "dataset=image_folder",
    "FakeData": "dataset=synthetic",
    "ImageFolder": "dataset=image_folder",
    "ImageNet": "dataset=image_folder",
    "VisionDataset": "dataset._target_=YOUR.CLASS",
}
"""Those for which there is another dataset here."""

_LEVELS = ("kingdom", "phylum", "class", "order", "family", "genus")
_SCENES = (
    *(
        "bedroom",
        "bridge",
        "church_outdoor",
        "classroom",
        "conference_room",
        "dining_room",
        "kitchen",
    ),
    *("living_room", "restaurant", "tower"),
)
OPTIONS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "CelebA": {"target_type": ("attr", "identity", "landmarks", "bbox")},
    "DTD": {"partition": tuple(range(1, 11))},
    "EMNIST": {"split": ("balanced", "byclass", "bymerge", "letters", "digits", "mnist")},
    "FGVCAircraft": {"annotation_level": ("variant", "family", "manufacturer")},
    "INaturalist": {
        "version": ("2021_train", "2021_train_mini", "2017", "2018", "2019"),
        "target_type": ("full", *_LEVELS, "super"),
    },
    "Imagenette": {"size": ("full", "320px", "160px")},
    "LFWPeople": {
        "split": ("10fold", "train", "test"),
        "image_set": ("funneled", "original", "deepfunneled"),
    },
    "LSUN": {"classes": _SCENES},
    "Omniglot": {"background": (True, False)},
    "Places365": {"split": ("train-standard", "train-challenge"), "small": (False, True)},
    "VOCSegmentation": {"year": ("2012", "2011", "2010", "2009", "2008", "2007")},
}
"""What may be chosen of a set by the words of its class there: the values, that which it takes by
itself first.
"""
SEVERAL = {("LSUN", "classes")}
"""Options whose value is a list of these."""
POSITIONS = ("landmarks", "bbox")
"""Of a `target_type`: places in the image, which must not be moved."""


def options_of(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options that are `given`, as the class there wants them: a year may be typed as a number."""
    known = OPTIONS.get(name, {})
    return {key: _as_known(value, known.get(key, ())) for key, value in (given or {}).items()}


def _as_known(value: Any, known: tuple[Any, ...]) -> Any:
    if isinstance(value, list | tuple):
        return [_as_known(each, known) for each in value]
    return next((each for each in known if str(each) == str(value)), value)


def targets_of(
    name: str, given: Mapping[str, Any] | None
) -> Literal["classes", "labels", "numbers"]:
    """What is to be predicted of its images, where that is no mask."""
    if name != "CelebA":
        return "classes"
    chosen = options_of(name, given).get("target_type", "attr")
    return "labels" if chosen == "attr" else "numbers" if chosen in POSITIONS else "classes"
