"""The `code/` of a run: classes of a notebook or script as modules, and who has written them."""

from __future__ import annotations

import atexit
import contextlib
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
    modules = own_modules([*filter(is_of_main, targets(config))])
    files = [file for name, file in modules.items() if is_of_main(name)]
    new = [file for file in files if file.parent.resolve() != folder.resolve()]
    for file in new:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / file.name)
    if new:
        sign(folder)


def remove(folder: Path) -> None:
    """Remove the copies of `keep`, and the folder unless it holds other files."""
    _remove_caches(folder)
    with contextlib.suppress(OSError):
        for file in (*folder.glob(f"{PREFIX}*.py"), folder / _SIGNATURE):
            file.unlink(missing_ok=True)
        folder.rmdir()


def find_kept(folder: Path, *, trust: bool = False) -> None:
    """Let this process, and those it starts, import modules that `keep` has copied.

    Raises ConfigError for files that this user has not written there, unless they are trusted.
    """
    if os.path.isdir(folder) and (path := str(folder.absolute())) not in sys.path:
        if not (trust or os.environ.get(TRUST) == "1"):
            _remove_caches(folder)
            if cache := next(folder.rglob("__pycache__"), None):
                raise ConfigError(
                    f"{cache}: can't be removed, and Python would run it in place of its source;"
                    f" remove it, or give trust_code=True, or {TRUST}=1 to a command"
                )
            if not is_signed(folder):
                raise ConfigError(
                    f"{folder}: holds code that you have not written on this machine, and to load"
                    " the run is to run it; read it, then give trust_code=True, or"
                    f" {TRUST}=1 to a command"
                )
        sys.path.append(path)
        importlib.invalidate_caches()


def sign(folder: Path) -> None:
    """Sign the files in `folder` by a key that only this user has, unless there can be none."""
    _remove_caches(folder)
    if key := _key():
        (folder / _SIGNATURE).write_text(_signature(folder, key))


def is_signed(folder: Path) -> bool:
    """Return whether this user has signed these files; who can have no key must own them."""
    if (key := _key()) is None:
        return all(os.lstat(at).st_uid == os.geteuid() for at in (folder, *folder.rglob("*")))
    try:
        signature = _signature(folder, key).encode()
        return hmac.compare_digest((folder / _SIGNATURE).read_bytes(), signature)
    except OSError:  # a file that another process removes meanwhile, too
        return False


def _remove_caches(folder: Path) -> None:
    """Remove Python's caches, which it runs in place of their source; nobody signs them."""
    for cache in folder.rglob("__pycache__"):
        shutil.rmtree(cache, ignore_errors=True)


def _signature(folder: Path, key: bytes) -> str:
    """Return the signature of all files and links; those to folders `keep` never makes."""
    total = hmac.new(key, digestmod="sha256")
    for at in sorted(at for at in folder.rglob("*") if at.is_file() or at.is_symlink()):
        if at.name != _SIGNATURE:
            content = hashlib.sha256(at.read_bytes()).hexdigest() if at.is_file() else "link"
            total.update(f"{at.relative_to(folder)}\0{content}\0".encode())
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
