"""The `code/` of a run: classes of a notebook or script as modules, and who has written them."""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import hmac
import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from expt.config.own_code import PREFIX, is_of_main, own_modules, targets
from expt.config.schema import RunConfig
from expt.errors import ConfigError

TRUST = "EXPT_TRUST_CODE"
_SIGNATURE = ".signature"


def write(digest: str, text: str) -> str:
    """Have the module of this digest importable, here and in processes started from here.

    Returns its name.
    """
    name = PREFIX + digest[:12]
    file = _written() / f"{name}.py"
    if not file.exists():
        file.write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
    return name


@functools.cache
def _written() -> Path:
    """Return a folder of this process, among those that it imports from."""
    folder = Path(tempfile.mkdtemp(prefix="expt-main-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sys.path.append(str(folder))
    return folder


def keep(config: RunConfig, folder: Path) -> None:
    """Copy the modules of this kind that a run's classes need into `folder`, for later commands."""
    for name, file in own_modules([*filter(is_of_main, targets(config))]).items():
        if is_of_main(name) and file.parent != folder:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / file.name)
            sign(folder)


def find_kept(folder: Path, *, trust: bool = False) -> None:
    """Let this process, and those it starts, import modules that `keep` has copied.

    Raises ConfigError for files that this user has not written there, unless they are trusted.
    """
    if os.path.isdir(folder) and (path := str(folder.absolute())) not in sys.path:
        if not (trust or os.environ.get(TRUST) == "1" or is_signed(folder)):
            raise ConfigError(
                f"{folder}: holds code that you have not written on this machine, and to load the"
                f" run is to run it; read it, then give trust_code=True, or {TRUST}=1 to a command"
            )
        sys.path.append(path)
        importlib.invalidate_caches()


def sign(folder: Path) -> None:
    """Sign the files in `folder` by a key that only this user has, unless there can be none."""
    if key := _key():
        (folder / _SIGNATURE).write_text(_signature(folder, key))


def is_signed(folder: Path) -> bool:
    """Return whether this user has signed these files; who can have no key must own them."""
    if (key := _key()) is None:
        return all(os.stat(at).st_uid == os.geteuid() for at in (folder, *_signed_files(folder)))
    signature = _signature(folder, key).encode()
    try:
        return hmac.compare_digest((folder / _SIGNATURE).read_bytes(), signature)
    except OSError:
        return False


def _signed_files(folder: Path) -> list[Path]:
    """Return all files but Python's caches."""
    found = (at for at in folder.rglob("*") if at.is_file() and at.name != _SIGNATURE)
    return sorted(at for at in found if "__pycache__" not in at.parts)


def _signature(folder: Path, key: bytes) -> str:
    total = hmac.new(key, digestmod="sha256")
    for file in _signed_files(folder):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{file.relative_to(folder)}\0{content}\0".encode())
    return total.hexdigest()


def _key() -> bytes | None:
    """Return the key of this user, made when it is first needed; None where it can't be kept."""
    try:
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        path = Path(base) / "expt" / "key"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_CREAT | os.O_RDWR, 0o600), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not (key := file.read()):
                file.write(key := os.urandom(32))
        return key
    except (OSError, RuntimeError):
        return None
