"""Tests of models, and the features that these are built for."""

from expt.features import Classes, Features, Image, Tokens


def images(channels: int, image_size: tuple[int, int], num_classes: int) -> Features:
    """Images of so many classes."""
    classes = Classes(names=tuple(map(str, range(num_classes))))
    return Features(Image(channels=channels, image_size=image_size), classes)


def tokens(vocab_size: int, context: int) -> Features:
    """A text."""
    each = Tokens(vocab_size=vocab_size, context=context)
    return Features(each, each)
