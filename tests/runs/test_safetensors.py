"""A checkpoint's file: any state returns exactly, others can read it, damage is refused."""

import collections
import io
import json
import math
import os
import pickle
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import lr_scheduler

from expt.errors import CheckpointError, ConfigError
from expt.runs import checkpoint, safetensors
from tests.facade import Capture, Patch, differing

TIED = torch.rand(3, 3)
STATE: dict[str, Any] = {
    "model": {
        "tied": TIED,
        "head": {"tied": TIED},
        "channels_last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "of one channel": torch.rand(9, 3).as_strided((9, 1, 3, 1), (3, 7, 1, 5)),
        "bfloat16": torch.rand(3, dtype=torch.bfloat16),
        "float8": torch.rand(3).to(torch.float8_e4m3fn),
        "complex": torch.rand(2, dtype=torch.complex64).conj(),
        "complex128": torch.rand(2, 2, dtype=torch.complex128).t(),
        "negative": torch._neg_view(torch.arange(3.0)),
        "scalar": torch.tensor(True),
        "empty": torch.empty(0, 3),
    },
    "a.b": torch.ones(1),
    "a": {"b": torch.zeros(1)},
    "keys": {0: "a number", "0": "text", (1, "a"): None, "$tensor": "a.b"},
    "floats": [math.nan, math.inf, -math.inf, -0.0, 0.1, 5e-324],
    "numbers": [True, 2**100, -1, 1 - 2j, b"\xff\x00", b""],
    "long": [[0.5] * 1000, (*range(1000),), [2**63] * 1000],
    "containers": ((), {}, [], {1}, frozenset("a"), collections.Counter(a=2)),
    "of torch": [torch.float32, torch.Size([1, 2])],
    "text": 'é"\n\udcff',
    "workers": [{"rng": b"\x01" * 3}],
}


def saved(path: Path, state: dict[str, Any] = STATE) -> Path:
    checkpoint.save(path, state)
    return path


def comes_back(state: dict[str, Any]) -> bool:
    checkpoint.refuse_unreadable(state, "")
    return not differing(checkpoint.load(checkpoint.dumps(state)), state)


def test_any_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    path = saved(tmp_path / "last.safetensors")
    found = checkpoint.load(path)
    assert not differing(found, STATE)
    assert comes_back(found)
    of_numpy = {np.int64(3): [np.float64(0.1), (np.bool_(True), np.float32(0.5))]}
    other = {"expanded": torch.ones(1, 3).expand(2, 3), "numpy": of_numpy}
    plain = {"expanded": torch.ones(2, 3), "numpy": {3: [0.1, (True, 0.5)]}}
    assert not differing(checkpoint.load(checkpoint.dumps(other)), plain)
    torch.save(found, io.BytesIO())  # as a person may
    found["model"]["scalar"].fill_(False)
    safetensors.check(path)


def test_others_read_it_in_a_few_lines(tmp_path: Path) -> None:
    path = saved(tmp_path / "last.safetensors")
    tensors = load_file(path)
    names = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
    assert names == {*STATE["model"]} - {"head"}, "what is tied is stored once"
    for name in ("tied", "channels_last", "negative", "float8"):
        assert torch.equal(tensors[f"model.{name}"].float(), STATE["model"][name].float())
    assert tensors["rank0.rng"].tolist() == [1, 1, 1]
    script = (
        "import json, sys; file = open(sys.argv[1], 'rb'); size = int.from_bytes(file.read(8),"
        " 'little'); print(json.loads(file.read(size))['__metadata__']['keys'])"
    )
    command = [sys.executable, "-I", "-S", "-c", script, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["$dict"][0] == [0, "a number"]


def stepped(optimizer: Any, parameter: Tensor, scheduler: Any = None) -> None:
    def loss() -> Tensor:
        optimizer.zero_grad()
        total: Tensor = (parameter**2).sum()
        total.backward()
        if isinstance(optimizer, torch.optim.SparseAdam):
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to_sparse()
        return total

    for _ in range(3):
        of_loss = [loss().item()] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []
        optimizer.step(loss)
        if scheduler is not None:
            scheduler.step(*of_loss)


@pytest.mark.slow
def test_the_state_of_every_optimizer_of_torch_comes_back() -> None:
    for kind in map(torch.optim.__dict__.get, torch.optim.__all__):
        if isinstance(kind, type) and kind is not torch.optim.Optimizer:
            parameter = nn.Parameter(torch.rand(4, 3))
            optimizer: Any = kind([parameter])
            stepped(optimizer, parameter)
            assert comes_back(optimizer.state_dict()), kind


SETTINGS: dict[str, Any] = {
    "LambdaLR": {"lr_lambda": lambda step: 0.5**step},
    "MultiplicativeLR": {"lr_lambda": lambda _: 0.5},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [1, 1, 2]},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 3},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2},
    "OneCycleLR": {"max_lr": 0.2, "total_steps": 9},
    **{name: {} for name in ("ConstantLR", "LinearLR", "PolynomialLR", "ReduceLROnPlateau")},
}


def test_the_state_of_every_scheduler_of_torch_comes_back() -> None:
    for name, settings in SETTINGS.items():
        parameter = nn.Parameter(torch.rand(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        scheduler = getattr(lr_scheduler, name)(optimizer, **settings)
        if name == "LinearLR":
            after = lr_scheduler.SequentialLR(optimizer, [scheduler, scheduler], [2])
            scheduler = lr_scheduler.ChainedScheduler([after])
        stepped(optimizer, parameter, scheduler)
        assert comes_back(scheduler.state_dict()), name


def test_every_damaged_byte_is_found_and_its_part_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "whole", {key: STATE[key] for key in ("model", "floats", "workers")})
    content, file = path.read_bytes(), safetensors.File(path)
    sizes = [one.data.nbytes for one in file.tensors.values()]
    ends = [*np.cumsum([len(content) - sum(sizes), *sizes])]
    bad = tmp_path / "bad"
    for place in (*range(50), *range(50, len(content), 29)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        bad.write_bytes(damaged)
        with pytest.raises(CheckpointError) as refused:
            safetensors.check(bad)
        if part := sum(end <= place for end in ends):
            assert f"{[*file.tensors][part - 1]} is damaged" in str(refused.value)
        bad.unlink()
    for other in (content[:-1], content[: ends[0]], content[:99], content + b"\0"):
        bad.write_bytes(other)
        with pytest.raises(CheckpointError, match=r"is truncated|is longer than it was"):
            safetensors.check(bad)


def test_a_file_is_known_by_its_device_too(tmp_path: Path, monkeypatch: Patch) -> None:
    path = saved(tmp_path / "whole")
    safetensors.check(path)
    about, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    safetensors.check(path)  # its number and time say that it was read
    of = {"st_ino": about.st_ino, "st_mtime_ns": about.st_mtime_ns}
    elsewhere = SimpleNamespace(**of, st_dev=about.st_dev + 1, st_size=about.st_size)
    monkeypatch.setattr(os, "fstat", lambda _: elsewhere)
    with pytest.raises(CheckpointError, match="is damaged"):
        safetensors.check(path)


class RunsCode:
    def __reduce__(self) -> Any:
        return print, ("this runs",)


def forged(rest: str, data: bytes = bytes(8)) -> bytes:
    """A file that has the right sums, whatever it says."""
    after = b'00000000","x":' + rest.encode()
    own = b"%08x" % zlib.crc32(safetensors.MARK + after)
    header = safetensors.MARK + own + after
    return len(header).to_bytes(8, "little") + header + data


def of_state(text: str) -> bytes:
    return forged(json.dumps(text) + "}}", b"")


def of_tensors(**tensors: tuple[str, Any, Any]) -> bytes:
    keys = ("dtype", "shape", "data_offsets")
    entries = {name: dict(zip(keys, one, strict=True)) for name, one in tensors.items()}
    return forged('"1"},' + json.dumps(entries)[1:])


def of_torch(state: Any) -> bytes:
    torch.save(state, file := io.BytesIO())
    return file.getvalue()


FORGED = {
    "a pickle": (pickle.dumps(RunsCode()), "is no safetensors file"),
    "a zip file": (of_torch({"model": RunsCode()}), "is no safetensors file"),
    "empty": (b"", "is empty"),
    "text": (b"no such thing", "is no safetensors file"),
    "a large header": ((2**60).to_bytes(8, "little") + b"{}", "its header has 1,152,921"),
    "of another program": (b"\x08" + bytes(7) + b"{}" + b" " * 6, "is of another program"),
    "not JSON": (forged('"1"'), "its header is not as expt writes it"),
    "NaN": (forged('"1"},"a":NaN}'), "its header has NaN"),
    "NaN in the state": (of_state("[NaN]"), "its header has NaN"),
    "a key twice": (forged('"1","x":"2"}}'), "its header has a key twice"),
    "a key twice in the state": (of_state('{"a":1,"a":2}'), "its header has a key twice"),
    "nested": (of_state("[" * 100_000), "RecursionError"),
    "an unknown tag": (of_state('{"$code":1}'), "its header is not as expt"),
    "a missing tensor": (of_state('{"$tensor":"a"}'), "its header is not as"),
    "a list as text": (forged("[1]}}", b""), "its header is not as expt writes it"),
    "overlapping": (of_tensors(a=("F32", [1], [0, 4]), b=("F32", [2], [0, 8])), "b can't be at 0"),
    "a gap": (of_tensors(a=("F32", [1], [4, 8])), "a can't be at 4 to 8"),
    "a large shape": (of_tensors(a=("F32", [2**62, 4], [0, 8])), "a can't be at 0 to 8"),
    "a large place": (of_tensors(a=("F32", [2**60], [0, 2**62])), "is truncated: its tensors"),
    "a negative shape": (of_tensors(a=("F32", [-1, -2], [0, 8])), "a can't be at 0 to 8"),
    "true as a size": (of_tensors(a=("F64", [True], [0, 8])), "a can't be at 0 to 8"),
    "an unknown dtype": (of_tensors(a=("F4", [16], [0, 8])), "KeyError: 'F4'"),
    "more data": (of_tensors(a=("F32", [1], [0, 4])), "is longer than it was written"),
}


@pytest.mark.parametrize(("content", "says"), FORGED.values(), ids=FORGED)
def test_forged_file_is_refused(content: bytes, says: str, tmp_path: Path, capsys: Capture) -> None:
    (path := tmp_path / "last.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        safetensors.check(path)
    assert says in str(refused.value)
    assert not capsys.readouterr().out, "no code is run"


def test_forged_strides_and_too_much_state_are_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    about = json.dumps('{"$tensor":"a","stride":[999]}')
    entry = '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    with pytest.raises(CheckpointError, match="strides"):
        checkpoint.load(memoryview(bytearray(forged(f"{about}}},{entry}}}"))))
    monkeypatch.setattr(safetensors, "MOST_HEADER", 1000)
    with pytest.raises(ConfigError, match="its state without tensors takes"):
        saved(tmp_path / "last.safetensors", {"text": "a" * 1000})
    assert not [*tmp_path.iterdir()]
