"""A signature of the code in a run's folder, by a key that only this user has.

The folder of somebody else, or one that somebody has changed, has none that fits.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
from pathlib import Path

SIZE = 32


def sign(folder: Path) -> None:
    """Sign the files in `folder`, unless this user can have no key."""
    if key := _key():
        (folder / _NAME).write_text(_signature(folder, key))


def is_signed(folder: Path) -> bool:
    """Return whether this user has signed these files; who can have no key must own them."""
    if (key := _key()) is None:
        return all(os.stat(at).st_uid == os.geteuid() for at in (folder, *_files(folder)))
    try:
        return hmac.compare_digest((folder / _NAME).read_bytes(), _signature(folder, key).encode())
    except OSError:
        return False


_NAME = ".signature"


def _files(folder: Path) -> list[Path]:
    """Return all files but Python's caches."""
    found = (at for at in folder.rglob("*") if at.is_file() and at.name != _NAME)
    return sorted(at for at in found if "__pycache__" not in at.parts)


def _signature(folder: Path, key: bytes) -> str:
    total = hmac.new(key, digestmod="sha256")
    for file in _files(folder):
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
                file.write(key := secrets.token_bytes(SIZE))
        return key
    except (OSError, RuntimeError):
        return None
