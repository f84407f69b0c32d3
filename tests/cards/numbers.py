"""What soft GPUs compute, beside what the CPU does."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Operator = Callable[[torch.Tensor], object]

OPERATORS: dict[str, Operator] = {
    "arange": lambda x: torch.arange(5.0, device=x.device),
    "in place": lambda x: x.clone().add_(1).mul_(2),
    "out": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
    "a list": lambda x: torch._foreach_norm([x, x * 2]),
    "a view": lambda x: x.t().contiguous().view(-1)[3:],
    "strided": lambda x: x[::2, 1:].exp(),
    "channels last": lambda x: x.view(1, 4, 2, 2).contiguous(memory_format=torch.channels_last) + 1,
    "empty": lambda x: torch.cat([x[:0], x]).sum(),
    "conjugate": lambda x: (x + 1j * x).conj().mul(2j).imag,
    "a conjugate is copied": lambda x: (
        torch.empty(4, 4, dtype=torch.cfloat, device=x.device).copy_((x + 1j * x).conj()).imag
    ),
    "types": lambda x: (x.half().sum(), x.long().sum(), x.bool().any(), x.to(torch.bfloat16)),
    "matmul": lambda x: x @ x + torch.einsum("ij,jk->ik", x, x),
    "double matmul": lambda x: x.double() @ x.double(),
    "svd": lambda x: torch.linalg.svd(x)[1],
    "solve": lambda x: torch.linalg.solve(x + 9 * torch.eye(4, device=x.device), x),
    "inverse": lambda x: torch.linalg.inv(x + 9 * torch.eye(4, device=x.device)),
    "sort": lambda x: x.flatten().sort(),
    "topk": lambda x: x.topk(2),
    "unique": lambda x: x.round().unique(return_counts=True),
    "nonzero": lambda x: (x > 0).nonzero(),
    "a mask": lambda x: x[x > 0],
    "assignment by a mask": lambda x: x.clone().masked_fill_(x > 0, 7),
    "index_put": lambda x: x.clone().index_put_((torch.tensor([1], device=x.device),), x[0]),
    "scatter": lambda x: torch.zeros_like(x).scatter_add_(0, x.argsort(0), x),
    "cumsum": lambda x: x.cumsum(0),
    "quantile": lambda x: x.quantile(0.3),
    "median": lambda x: x.median(0),
    "histc": lambda x: x.histc(3),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
    "outer products": lambda x: x[:, :, None] @ x[:, None],
    "convolution": lambda x: F.conv2d(x[None, None], x[None, None, :3, :3], padding=1),
    "grouped convolution": lambda x: F.conv1d(x[None], x[:, None, :3], groups=4),
    "transposed convolution": lambda x: F.conv_transpose2d(x[None, None], x[None, None, :2, :2]),
    "pooling": lambda x: (F.max_pool2d(x[None], 2), F.avg_pool2d(x[None], 2)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "embedding": lambda x: F.embedding(torch.tensor([[0, 3]], device=x.device), x),
    "embedding bag": lambda x: F.embedding_bag(torch.tensor([[0, 3]], device=x.device), x),
    "ctc": lambda x: F.ctc_loss(
        x[:, None].log_softmax(2), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    ),
    "losses": lambda x: (F.cross_entropy(x, x.argmax(1)), F.mse_loss(x, x * 2), F.l1_loss(x, -x)),
    "norms": lambda x: (F.layer_norm(x, (4,)), F.group_norm(x, 2), F.rms_norm(x, (4,))),
    "rms norm in half": lambda x: F.rms_norm(x.bfloat16(), (4,), x[0].bfloat16(), 1e-5),
    "norm of gradients": lambda x: torch.nn.utils.get_total_norm([x, x]),
    "tokens": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0], device=x.device)),
}


def flattened(found: object) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found.cpu()]
    return [tensor for each in found for tensor in flattened(each)]  # type: ignore[attr-defined]


def operators_are_those_of_the_cpu() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for name, operator in OPERATORS.items():
        expected, found = flattened(operator(x)), flattened(operator(x.to("cuda:1")))
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6, msg=name)
    assert x.to("cuda:1").relu().device == torch.device("cuda:1")


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU], bias: bool) -> None:
        super().__init__()
        self.cells = kind(8, 16, 2, batch_first=True, bias=bias)
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.cells(x.flatten(1).view(-1, 8, 8))[0][:, -1]))
        return out


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.flatten(1)[:, :12].abs() * 4).long().clamp(0, 9)
        out: torch.Tensor = self.head(self.layer(self.embedding(tokens)).mean(1))
        return out


def dense() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 10)
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": dense,
    "convolutional": convolutional,
    "attending": Attending,
    "lstm": lambda: Recurrent(nn.LSTM, True),
    "lstm without bias": lambda: Recurrent(nn.LSTM, False),
    "gru": lambda: Recurrent(nn.GRU, True),
}
UPDATES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 1e-2, fused=True),
    "adam foreach": lambda model: torch.optim.Adam(model.parameters(), 1e-2, foreach=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, 0.9, nesterov=True, fused=True),
    "sgd foreach": lambda model: torch.optim.SGD(model.parameters(), 0.1, 0.9, foreach=True),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), 1e-3),
}


def curve(
    model: str, device: str, update: str = "adamw", kind: torch.dtype | None = None
) -> list[float]:
    torch.manual_seed(0)
    net = MODELS[model]().to(device)
    optimizer, generator = UPDATES[update](net), torch.Generator().manual_seed(1)
    where = torch.device(device).type
    scaler = torch.amp.GradScaler(where, 2.0**10, enabled=kind == torch.float16)
    losses = []
    for _ in range(6):
        x = torch.randn(16, 1, 8, 8, generator=generator)
        y = torch.randint(10, (16,), generator=generator)
        x, y = x.to(device), y.to(device)
        with torch.autocast(where, kind or torch.bfloat16, enabled=kind is not None):
            loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def models_train_as_on_the_cpu() -> None:
    cases = [(model, "adamw") for model in MODELS] + [("dense", update) for update in UPDATES]
    for model, update in cases:
        expected, found = curve(model, "cpu", update), curve(model, "cuda:1", update)
        worst = max(abs(a - b) for a, b in zip(expected, found, strict=True))
        assert worst < 1e-6, (model, update, worst)


def half_precision_is_cudas() -> None:
    """Curves resemble those in float32: the CPU in half precision casts other operators."""
    with torch.autocast("cuda", torch.float16):
        x = torch.ones(2, 2, device="cuda")
        assert (x @ x).dtype == torch.float16
        assert (x @ x).softmax(0).dtype == torch.float32  # as CUDA has it, and the CPU has not
    for model in ("dense", "convolutional", "attending", "lstm"):
        for kind in (torch.float16, torch.bfloat16):
            expected, found = curve(model, "cpu"), curve(model, "cuda:1", kind=kind)
            worst = max(abs(a - b) for a, b in zip(expected, found, strict=True))
            assert worst < 2e-2, (model, kind, worst)
    scaler = torch.amp.GradScaler("cuda")
    weight = nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = torch.optim.SGD([weight], 1.0, fused=True)
    scaler.scale((weight * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1, 1]  # the step is skipped, without a wait
    assert scaler.get_scale() == 2**15
