"""A small convolutional network."""

from torch import nn


class Net(nn.Sequential):
    """Two convolutions, a pooling and two layers, for images of any size from 6 by 6."""

    def __init__(self, channels, image_size, num_classes, width, dropout):
        height, across = ((pixels - 4) // 2 for pixels in image_size)
        super().__init__(
            nn.Conv2d(channels, width, 3),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(2 * width * height * across, 4 * width),
            nn.ReLU(),
            nn.Dropout(2 * dropout),
            nn.Linear(4 * width, num_classes),
        )
