"""Detection: a small RetinaNet of torchvision's finds squares and crosses in pictures."""

import torch
from torch import nn
from torch.utils.data import Dataset
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

import expt


class Shapes(Dataset):
    """Pictures of 48 or 64 pixels with 1 to 3 squares (class 1) or crosses (class 2) each."""

    def __init__(self, train, size):
        self.first, self.size = (0 if train else 10**6), size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(self.first + index)
        height, width = (48 + 16 * torch.randint(2, (2,), generator=drawn)).tolist()
        image = 0.3 * torch.rand(3, height, width, generator=drawn)
        boxes, labels = [], []
        for _ in range(int(torch.randint(1, 4, (), generator=drawn))):
            side = int(torch.randint(10, 20, (), generator=drawn))
            x = int(torch.randint(width - side, (), generator=drawn))
            y = int(torch.randint(height - side, (), generator=drawn))
            labels.append(int(torch.randint(1, 3, (), generator=drawn)))
            middle = slice(side // 3, -(side // 3))
            within = image[:, y : y + side, x : x + side]
            parts = [within] if labels[-1] == 1 else [within[:, middle], within[:, :, middle]]
            for part in parts:
                part.fill_(0.9)
            boxes.append([x, y, x + side, y + side])
        return image, {"boxes": torch.tensor(boxes).float(), "labels": torch.tensor(labels)}

    def collate(self, samples):
        images, targets = zip(*samples, strict=True)
        return list(images), list(targets)


class Detector(RetinaNet):
    """A RetinaNet whose backbone has four convolutions and no batch norms."""

    def __init__(self, num_classes, width, side):
        layers = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU()]
        backbone = nn.Sequential(*layers)
        backbone.out_channels = width
        anchors = AnchorGenerator(((12, 16, 20),), ((1.0,),))
        super().__init__(backbone, num_classes, side, side, anchor_generator=anchors)


class Detection(expt.Task):
    """The sum of the losses of classes and boxes; in an evaluation boxes, too."""

    def forward(self, model, batch):
        if model.training:
            return model(batch.inputs, batch.targets), None
        found, losses = model(batch.inputs), None
        if batch.targets is not None:
            with expt.train_mode(model):
                losses = model(batch.inputs, batch.targets)
        return losses, found

    def loss(self, outputs, batch):
        return sum(outputs[0].values()) * batch.size, batch.size  # torchvision's are means

    def predict(self, outputs):
        return outputs[1]

    def predictions(self, outputs, batch):
        return outputs[1], batch.targets
