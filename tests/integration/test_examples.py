"""The examples: each has the losses of a plain loop of torch in every step, on one and two workers.

The loops are written from the same first weights and the same order of samples, with torch's own
means; of an example they take the model, and the dataset.
"""

import gzip
import runpy
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn, optim
from torch.distributions import Normal, kl_divergence
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

import expt
from expt.data import indexing
from expt.data.seeding import seeded
from scripts.documents.following import ROOT
from tests.facade import RunFolder, as_typed, run

DIGITS = "dataset=digits dataset.mean=[0.1307] dataset.std=[0.3081] dataset.train_limit=40"
EXAMPLES = ROOT / "scripts" / "examples"
SEED, SIZE, BATCH, EPOCHS = 0, 40, 12, 2
MAX_LINES = 60
Own = dict[str, Any]
"""The names of an example's module."""
Curves = dict[str, list[float]]
Loss = Callable[..., Tensor]


def order(size: int = SIZE, val_fraction: float = 0.1, limit: int | None = None) -> Iterator[Any]:
    """Yield each step's epoch and samples."""
    train, _ = indexing.split(size, val_fraction, limit)
    for epoch in range(1, EPOCHS + 1):
        shuffled = train[indexing.permutation(len(train), SEED, epoch)]
        for batch in shuffled.split(BATCH)[: len(train) // BATCH]:
            yield epoch, batch.tolist()


def samples(dataset: Any) -> Iterator[list[Any]]:
    """Yield the samples of each step."""
    for epoch, batch in order(len(dataset)):
        found = []
        for index in batch:
            with seeded(indexing.mix(SEED, epoch, index)):
                found.append(dataset[index])
        yield found


def batches(dataset: Any) -> Iterator[Any]:
    return map(default_collate, samples(dataset))


def first(folder: Path, build: Callable[..., nn.Module], *arguments: Any) -> Any:
    """Return a model, whose weights the run begins with, too."""
    torch.manual_seed(SEED)
    model = build(*arguments)
    torch.save(model.state_dict(), folder / "first.pt")
    return model


def descend(
    optimizer: optim.Optimizer, steps: Iterable[Any], loss: Loss, clip: float | None = None
) -> list[float]:
    found = []
    for batch in steps:
        optimizer.zero_grad()
        value = loss(batch)
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
        optimizer.step()
        found.append(value.item())
    return found


def digits() -> tuple[Tensor, Tensor]:
    found = np.load(ROOT / "expt/data/digits.npz")
    images = torch.from_numpy(found["train_images"]).view(-1, 1, 8, 8) / 255
    return (images - 0.1307) / 0.3081, torch.from_numpy(found["train_labels"]).long()


def mnist(own: Own, folder: Path) -> Curves:
    images, labels = digits()
    model, found = first(folder, own["Net"], 1, (8, 8), 10, 4, 0.0), list[float]()
    optimizer = optim.Adadelta(model.parameters(), 1.0)
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    loss = nn.CrossEntropyLoss()
    for epoch in (1, 2):
        steps = [batch for at, batch in order(len(labels), limit=SIZE) if at == epoch]
        found += descend(optimizer, steps, lambda at: loss(model(images[at]), labels[at]))
        schedule.step()
    return {"loss": found}


def vae(own: Own, folder: Path) -> Curves:
    model = first(folder, own["VAE"], 16, 3)

    def loss(batch: Any) -> Tensor:
        image, noise = batch["image"], batch["noise"]
        mean, log_variance = model.encoder(image).chunk(2, 1)
        deviation = torch.exp(0.5 * log_variance)
        drawn = model.generator(mean + deviation * noise)
        error = functional.binary_cross_entropy(drawn, image, reduction="sum") / len(image)
        divergence = kl_divergence(Normal(mean, deviation), Normal(0.0, 1.0)).sum() / len(image)
        return error + divergence

    steps = batches(own["Images"](folder, True, 3))
    return {"loss": descend(optim.Adam(model.parameters()), steps, loss)}


def dcgan(own: Own, folder: Path) -> Curves:
    """With an optimiser for each network; what is generated is used for both updates."""
    model = first(folder, own["GAN"], 5, 4)
    generator, discriminator = model.generator, model.discriminator
    how: Any = {"lr": 0.0002, "betas": (0.5, 0.999)}
    of_one, of_other = (optim.Adam(net.parameters(), **how) for net in (discriminator, generator))
    loss, found = nn.BCEWithLogitsLoss(), Curves(loss=[], generator=[], d_real=[])
    for batch in batches(own["Images"](folder, True, 5)):
        ones, zeros = torch.ones(BATCH), torch.zeros(BATCH)
        fake = generator(batch["noise"])
        of_one.zero_grad()
        real = discriminator(batch["image"])
        found["d_real"].append(torch.sigmoid(real).mean().item())
        first_loss = loss(real, ones) + loss(discriminator(fake.detach()), zeros)
        first_loss.backward()
        of_one.step()
        of_other.zero_grad()
        second_loss = loss(discriminator(fake), ones)
        second_loss.backward()
        of_other.step()
        found["loss"].append(first_loss.item())
        found["generator"].append(second_loss.item())
    return found


def siamese(own: Own, folder: Path) -> Curves:
    model = first(folder, own["Siamese"], 4, 8)

    def loss(batch: Any) -> Tensor:
        (one, other), same = batch
        difference = torch.abs(model.tower(one) - model.tower(other))
        likely = torch.sigmoid(model.head(difference)).squeeze(1)
        return functional.binary_cross_entropy(likely, same.float())

    steps = batches(own["Pairs"](folder, True))
    return {"loss": descend(optim.Adam(model.parameters()), steps, loss)}


def detection(own: Own, folder: Path) -> Curves:
    model, dataset = first(folder, own["Detector"], 3, 4, 32), own["Shapes"](True, SIZE)

    def loss(batch: list[Any]) -> Tensor:
        images, targets = map(list, zip(*batch, strict=True))
        losses: dict[str, Tensor] = model(images, targets)
        return losses["classification"] + losses["bbox_regression"]

    return {"loss": descend(optim.Adam(model.parameters(), 0.002), samples(dataset), loss)}


def contrastive(own: Own, folder: Path) -> Curves:
    torch.manual_seed(SEED)
    model = own["Encoder"](4, 8)
    model(torch.zeros(1, 1, 24, 24))
    torch.save(model.state_dict(), folder / "first.pt")

    def loss(batch: Any) -> Tensor:
        views = model(torch.cat([*batch]))
        cosines = functional.cosine_similarity(views[:, None], views[None], dim=2) / 0.2
        others = cosines.masked_fill(torch.eye(len(views), dtype=torch.bool), -torch.inf)
        partners = others.diagonal(len(views) // 2)
        both = torch.cat((partners, partners))
        return 2 * (others.logsumexp(1) - both).mean()

    steps = batches(own["Views"](folder, True, 24))
    return {"loss": descend(optim.Adam(model.parameters()), steps, loss)}


def diffusion(own: Own, folder: Path) -> Curves:
    model, mean = first(folder, own["Diffusion"], 4, 2), nn.MSELoss()

    def loss(batch: Any) -> Tensor:
        angle = batch["angle"]
        noisy = torch.cos(angle) * batch["image"] + torch.sin(angle) * batch["noise"]
        found: Tensor = mean(model.generator.noise_in(noisy, angle), batch["noise"])
        return found

    steps = batches(own["Images"](folder, True))
    return {"loss": descend(optim.Adam(model.parameters()), steps, loss)}


def super_resolution(own: Own, folder: Path) -> Curves:
    model, mean = first(folder, own["Upscale"], 8), nn.MSELoss()
    steps = batches(own["Shrunk"](folder, True))
    optimizer = optim.Adam(model.parameters())
    losses = descend(optimizer, steps, lambda batch: mean(model(batch[0]), batch[1]))
    return {"loss": losses, "psnr": (-10 * torch.tensor(losses).log10()).tolist()}


def translation(own: Own, folder: Path) -> Curves:
    model = first(folder, own["Translator"], 16, 2, 1, 6)
    mean = nn.CrossEntropyLoss(ignore_index=0)

    def loss(batch: Any) -> Tensor:
        numbers, sentences = (pad_sequence([*each], True) for each in zip(*batch, strict=True))
        logits = model(numbers, sentences[:, :-1])
        value: Tensor = mean(logits.transpose(1, 2), sentences[:, 1:])
        return value

    steps = samples(own["Reversed"](True, SIZE, 6))
    optimizer = optim.Adam(model.parameters(), 0.0005)
    return {"loss": descend(optimizer, steps, loss, clip=1.0)}


def images(own: Own, folder: Path) -> Curves:
    """Three steps: batch norms of a deep network enlarge what rounding changes."""
    from torchvision.models import resnet18

    files = sorted((folder / "images" / "train").glob("*/*.png"))
    names = sorted({file.parent.name for file in files})
    pixels = [torch.from_numpy(np.array(Image.open(file).convert("RGB"))) for file in files]
    inputs = torch.stack(pixels).permute(0, 3, 1, 2) / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    inputs = (inputs - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    labels = torch.tensor([names.index(file.parent.name) for file in files])

    def build() -> Any:
        model = resnet18(num_classes=len(names))
        model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
        return model

    model = first(folder, build)
    optimizer = optim.SGD(model.parameters(), 0.001, 0.9, weight_decay=0.0001)
    steps = [batch for _, batch in order(val_fraction=0.0)][:3]
    loss = nn.CrossEntropyLoss()
    return {"loss": descend(optimizer, steps, lambda at: loss(model(inputs[at]), labels[at]))}


def graph(own: Own, folder: Path) -> Curves:
    """With the whole graph as a matrix, all nodes in each step."""
    model = first(folder, own["GCN"], 60, 3, 4, 5)
    (to, origin), features, classes = own["blocks"](60, 3, 4)
    joined = torch.zeros(60, 60)
    joined[to, origin] = 1.0
    root = torch.diag(joined.sum(1) ** -0.5)
    spread = root @ joined @ root
    known = torch.arange(0, 60, 2)

    def loss(_: Any) -> Tensor:
        hidden = functional.relu(spread @ model.first(features))
        outputs = spread @ model.second(hidden)
        return functional.cross_entropy(outputs[known], classes[known])

    optimizer = optim.Adam(model.parameters(), 0.01, weight_decay=0.0005)
    return {"loss": descend(optimizer, range(EPOCHS), loss)}


def gpt(own: Own, folder: Path) -> Curves:
    text = torch.tensor(list((folder / "text.txt").read_bytes()))
    text = text[: len(text) - 2 * round(len(text) * 0.1)]
    model = first(folder, own["GPT"], 256, 7, 16, 2, 2)
    kinds = [[p for p in model.parameters() if (p.dim() > 1) == many] for many in (True, False)]
    groups = [{"params": kinds[0], "weight_decay": 0.1}, {"params": kinds[1], "weight_decay": 0.0}]
    optimizer = optim.AdamW(groups, 0.002, (0.9, 0.99))

    def loss(batch: list[int]) -> Tensor:
        windows = torch.stack([text[7 * at : 7 * at + 8] for at in batch])
        logits = model(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    steps = (batch for _, batch in order((len(text) - 1) // 7, 0.0))
    return {"loss": descend(optimizer, steps, loss)}


def time_series(own: Own, folder: Path) -> Curves:
    """With a closure that L-BFGS calls four times in each step."""
    model, losses = first(folder, own["Recurrent"], 6), list[float]()
    optimizer = optim.LBFGS(model.parameters(), 0.8, 4)
    waves = own["Waves"](True, BATCH, 30).waves

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = functional.mse_loss(model(waves[:, :-1]), waves[:, 1:])
        value.backward()
        return value

    for _ in range(EPOCHS):
        losses.append(optimizer.step(closure).item())
    return {"loss": losses}


def airbench(own: Own, folder: Path) -> Curves:
    """With the polynomial of the optimiser's three steps applied to singular values."""
    images, labels = digits()
    model, losses = first(folder, own["Net"], 10, 4, folder, 0.1307, 0.3081), list[float]()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    moving = [torch.zeros_like(weight) for weight in trained]
    for _, batch in order(len(labels), limit=SIZE):
        loss = functional.cross_entropy(model(images[batch]), labels[batch], label_smoothing=0.2)
        losses.append(loss.item())
        for weight, buffer, slope in zip(
            trained, moving, torch.autograd.grad(loss, trained), strict=True
        ):
            buffer.copy_(0.6 * buffer + slope)
            update = slope + 0.6 * buffer
            with torch.no_grad():
                if weight.dim() < 4:
                    weight -= 0.01 * 0.5 * update
                    continue
                weight *= len(weight) ** 0.5 / weight.norm()
                left, values, right = torch.linalg.svd(update.flatten(1), full_matrices=False)
                values = values / (values.square().sum().sqrt() + 1e-7)
                for _ in range(3):
                    values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
                weight -= 0.01 * (left @ values.diag() @ right).view_as(weight)
    return {"loss": losses}


def word_lm(own: Own, folder: Path) -> Curves:
    """Window after window of all columns, with the LSTM's state."""
    dataset = own["Columns"](folder / "text.txt", "train", BATCH, 5, 20)
    model, state = first(folder, own["Words"], 20, 8, 2), None

    def loss(start: int) -> Tensor:
        nonlocal state
        columns = dataset.columns[:, start : start + 6]
        state = None if start == 0 or state is None else tuple(each.detach() for each in state)
        hidden, state = model.body(model.embedding(columns[:, :-1]), state)
        return functional.cross_entropy(model.head(hidden).transpose(1, 2), columns[:, 1:])

    windows = (dataset.columns.shape[1] - 1) // 5
    steps = [5 * at for _ in range(EPOCHS) for at in range(windows)]
    losses = descend(optim.Adam(model.parameters(), 0.002), steps, loss, clip=0.25)
    return {"loss": losses, "perplexity": torch.tensor(losses).exp().tolist()}


def two_tower(own: Own, folder: Path) -> Curves:
    """With two optimizers, and only the scores of the items in the batch."""
    model = first(folder, own["Towers"], 8, 12, 4)
    (users, items), losses = (zip(model.tables, model.towers, strict=True)), list[float]()
    of_tables = optim.SparseAdam([*model.tables.parameters()], 0.01)
    of_towers = optim.AdamW(model.towers.parameters(), 0.003)
    dataset = own["Choices"](True, 8, 12, 5)
    for batch in samples(dataset):
        chosen_by, chosen = (torch.tensor(each) for each in zip(*batch, strict=True))
        among, right = chosen.unique(return_inverse=True)
        one, other = (
            functional.normalize(tower(table(numbers)), dim=1)
            for (table, tower), numbers in ((users, chosen_by), (items, among))
        )
        loss = functional.cross_entropy(10 * one @ other.T, right)
        losses += descend(of_towers, [loss], lambda value: value)
        of_tables.step()
        of_tables.zero_grad()
    return {"loss": losses}


def distillation(own: Own, folder: Path) -> Curves:
    """With the divergence from the teacher's probabilities by hand."""
    images, labels = digits()
    words = as_typed(DIGITS + " model.hidden=[5] max_steps=3 batch_size=12 world_size=1")
    assert run(*words, "hydra.run.dir=teacher", cwd=folder).returncode == 0
    teacher = expt.load(folder / "teacher")
    model = first(folder, own["Student"], 1, (8, 8), 10, 4)

    def loss(at: list[int]) -> Tensor:
        outputs = model(images[at])
        wanted = torch.softmax(teacher(images[at]).detach() / 4, 1)
        divergence = wanted * (wanted.log() - torch.log_softmax(outputs / 4, 1))
        hard = functional.cross_entropy(outputs, labels[at])
        value: Tensor = 0.9 * 16 * divergence.sum(1).mean() + 0.1 * hard
        return value

    steps = (batch for _, batch in order(len(labels), limit=SIZE))
    return {"loss": descend(optim.Adam(model.parameters()), steps, loss)}


def lora(own: Own, folder: Path) -> Curves:
    """With the tokenizer's own padding, and layers that the files lack trained whole by peft."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    own["write"](folder, 50, 16)
    lines = (folder / "reviews.csv").read_text().splitlines()[1 : 1 + SIZE]
    texts, verdicts = zip(*(line.split(",") for line in lines), strict=True)
    labels = torch.tensor([["bad", "good"].index(verdict) for verdict in verdicts])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tiny")
    auto = transformers.AutoModelForSequenceClassification
    how: Any = {"target_modules": "all-linear", "modules_to_save": ["classifier", "pooler.dense"]}
    settings = peft.LoraConfig(task_type="SEQ_CLS", r=2, **how)
    torch.manual_seed(SEED)
    model = peft.get_peft_model(auto.from_pretrained(folder / "tiny", num_labels=2), settings)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    torch.save({f"model.{name}": each for name, each in trained.items()}, folder / "first.pt")
    optimizer = optim.AdamW(trained.values(), 0.005, weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 1, 6)

    def loss(at: list[int]) -> Tensor:
        padded = tokenizer([texts[each] for each in at], padding=True, return_tensors="pt")
        return functional.cross_entropy(model(**padded).logits, labels[at])

    losses = list[float]()
    for _, batch in order(SIZE, 0.0):
        losses += descend(optimizer, [batch], loss)
        schedule.step()
    return {"loss": losses}


def reinforce(own: Own, folder: Path) -> Curves:
    """Episode after episode, each ended where the pole falls."""
    model = first(folder, own["Policy"], 4)

    def episode(seed: int) -> tuple[Tensor, int]:
        drawn = torch.rand(4 + 9, generator=torch.Generator().manual_seed(seed))
        state, kept = drawn[:4] / 10 - 0.05, list[tuple[Tensor, Tensor]]()
        for uniform in drawn[4:]:
            if abs(state[0]) >= 2.4 or abs(state[2]) >= 0.2095:
                break
            *logits, expected = model(state)
            likely = torch.sigmoid(logits[1] - logits[0])
            right = bool(likely > uniform)
            kept.append((torch.log(likely if right else 1 - likely), expected))
            state = own["push"](state[None], torch.tensor([right]))[0]
        total, found = torch.zeros(()), 0.0
        for chosen, expected in reversed(kept):
            found = 0.1 + 0.9 * found
            gain = found - expected
            total = total + gain**2 / 2 - gain.detach() * chosen
        return total, len(kept)

    def loss(seeds: list[int]) -> Tensor:
        totals, steps = zip(*map(episode, seeds), strict=True)
        value: Tensor = torch.stack(totals).sum() / sum(steps)
        return value

    places = torch.arange(2 * EPOCHS * BATCH).split(BATCH)
    steps = [[indexing.mix(SEED, 0, at) for at in each.tolist()] for each in places]
    return {"loss": descend(optim.Adam(model.parameters(), 0.01), steps, loss)}


SMALL: dict[Callable[[Own, Path], Curves], str] = {
    mnist: DIGITS + " model.width=4 model.dropout=0",
    airbench: DIGITS
    + """ ~dataset.root dataset.augment.flip=false dataset.augment.crop_padding=0
        model.root=. model.width=4 optimizer.lr=0.01 scheduler=constant""",
    vae: "dataset.root=. model.width=16 model.latent=3 dataset.latent=3 callbacks=[]",
    dcgan: "dataset.root=. model.noise=5 model.width=4 dataset.noise=5 callbacks=[]",
    siamese: "dataset.root=. model.width=4 model.features=8",
    contrastive: "dataset.root=. model.width=4 model.features=8",
    diffusion: "dataset.root=. model.width=4 model.steps=2 ema=null callbacks=[]",
    detection: "dataset.size=40 model.width=4 model.side=32",
    super_resolution: "dataset.root=. model.width=8",
    translation: """model.width=16 model.heads=2 model.layers=1 model.longest=6
        dataset.longest=6 dataset.size=40""",
    images: """dataset.image_size=[28,28] model.stem=small dataset.augment.flip=false
        optimizer.lr=0.001 max_steps=3""",
    graph: """dataset.nodes=60 dataset.num_classes=3 dataset.features=4 dataset.every=2
        dataset.val_fraction=0 model.width=5 eval_split=test objective=loss/test batch_size=30""",
    gpt: """dataset.root=text.txt model.width=16 model.heads=2 model.blocks=2 dataset.context=7
        scheduler=constant scheduler.warmup_epochs=0 gradient_clip=null""",
    time_series: "model.width=6 dataset.size=12 dataset.length=30 optimizer.max_iter=4",
    two_tower: """dataset.users=8 dataset.items=12 dataset.each=5 model.width=4
        scheduler=constant""",
    distillation: DIGITS + " model.width=4",
    reinforce: """model.width=4 task.length=9 task.discount=0.9 epoch_steps=2 dataset.val=3
        early_stop=null""",
    lora: """dataset.val_split=last dataset.test_fraction=0.1 dataset.val_fraction=0.12
        dataset.group_by_length=false model.lora.rank=2 scheduler.warmup_steps=1""",
    word_lm: "dataset.root=text.txt dataset.window=5 dataset.words=20 model.width=8",
}
"""What is typed for each, so that a loop takes no time: a very small model, and few samples."""
QUICK = (word_lm,)


@pytest.fixture
def example(tmp_path: Path) -> Callable[[str], Path]:
    """`example("vae")`: a copy of the example, with small data that it may take."""

    def copied(name: str) -> Path:
        folder = tmp_path / name
        shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
        drawn = torch.Generator().manual_seed(1)
        for start, size in (("train", SIZE), ("t10k", 20)):
            pixels = torch.randint(256, (size, 28, 28), generator=drawn, dtype=torch.uint8)
            labels = torch.arange(size, dtype=torch.uint8) % 4
            for kind, values, header in (("images-idx3", pixels, 16), ("labels-idx1", labels, 8)):
                with gzip.open(folder / f"{start}-{kind}-ubyte.gz", "wb") as file:
                    file.write(bytes(header) + values.numpy().tobytes())
        words = torch.randint(97, 123, (1200,), generator=drawn).tolist()
        (folder / "text.txt").write_text(" ".join(map(chr, words)))
        return folder

    return copied


def words_of(plain: Callable[[Own, Path], Curves]) -> list[str]:
    """Return what is typed: the experiment with a very small model, and little data."""
    few = f"batch_size={BATCH} epochs={EPOCHS} log_every=1 tensorboard.images=false "
    return [f"experiment={plain.__name__}", *as_typed(few + SMALL[plain])]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers
@pytest.mark.parametrize(
    "plain",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in SMALL],
    ids=lambda plain: plain.__name__,
)
def test_its_losses_are_those_of_a_plain_loop_on_one_and_two_workers(
    plain: Callable[[Own, Path], Curves], example: Callable[[str], Path]
) -> None:
    folder = example(plain.__name__)
    own = runpy.run_path(str(next(folder.glob("*.py"))))
    if plain is images:
        for start, part, size in (("train", "train", SIZE), ("t10k", "val", 20)):
            own["write"](folder, start, folder / "images" / part, size)
    expected = plain(own, folder)
    words = [*words_of(plain), "weights=first.pt", "world_size=1,2"]
    done = run("-m", *words, "hydra.sweep.dir=sweep", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = [RunFolder(path.parent) for path in folder.glob("sweep/*/result.json")]
    assert sorted(each.result["world_size"] for each in found) == [1, 2]
    for each in found:
        for tag, values in expected.items():
            curve = [value for _, value in each.curve(f"running/{tag}")]
            near = 1e-4 if plain is images else 1e-5
            assert curve == pytest.approx(values, rel=near, abs=near), (each.folder.name, tag)


def test_each_is_compared_and_short() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == {plain.__name__ for plain in SMALL}
    for path in EXAMPLES.glob("*/*.py"):
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        assert len(lines) <= MAX_LINES, path


@pytest.mark.slow
def test_a_carried_state_is_resumed(example: Callable[[str], Path]) -> None:
    """By two workers, of which each has its own, from within the second epoch."""
    folder = example("word_lm")
    words = [*words_of(word_lm), "world_size=2", "checkpoint.every_steps=3"]
    whole = run(*words, "hydra.run.dir=whole", cwd=folder)
    assert whole.returncode == 0, whole.stderr
    steps = len(RunFolder(folder / "whole").curve("running/loss"))
    fault = f"1:{steps - 2}:kill"
    assert run(*words, "hydra.run.dir=killed", cwd=folder, EXPT_FAULT=fault).returncode != 0
    resumed = run(*words, "hydra.run.dir=killed", "resume=auto", cwd=folder)
    assert resumed.returncode == 0, resumed.stderr
    assert RunFolder(folder / "killed").points == RunFolder(folder / "whole").points
