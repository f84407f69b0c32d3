"""A person's own modules run as their source is now, and not as a cached .pyc that only seems to be
of it.

Python takes a .pyc for that of any file of the same size and, in whole seconds, the same time: `cp
-p`, rsync and git bring such files, and expt.config.user_code tells runs apart by the source. What
is cached here bears the hash of its source (PEP 552), which Python itself compares too."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import marshal
import os
import stat
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from expt.config.user_code import is_installed

_HASHED = (0b11).to_bytes(4, "little")
"""The flags of a .pyc that is checked by the hash of its source."""


def install() -> None:
    """Let this process import own modules so from now on, those too that others import, or a
    function does later.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder:
    """Has the others find a module, and changes how an own one is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in [each for each in sys.meta_path if each is not self]:
            if spec := finder.find_spec(name, path, target):
                if type(spec.loader) is SourceFileLoader and _is_own(
                    os.path.dirname(spec.loader.path)
                ):
                    spec.loader = _FromSource(spec.loader.name, spec.loader.path)
                return spec
        return None


_FINDER = _Finder()


@functools.cache  # of hundreds of modules that torch imports late
def _is_own(folder: str) -> bool:
    return not is_installed(Path(folder))


class _FromSource(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        cache = importlib.util.cache_from_source(path)
        head = importlib.util.MAGIC_NUMBER + _HASHED + importlib.util.source_hash(source)
        if found := _cached(cache, head, path):
            return found
        code: CodeType = self.source_to_code(source, path)
        if not sys.dont_write_bytecode:
            with contextlib.suppress(OSError):
                mode = (
                    os.stat(path).st_mode | stat.S_IWUSR
                )  # who may not read the source may not read this
                self.set_data(cache, head + marshal.dumps(code), _mode=mode)
        return code


def _cached(cache: str, head: bytes, path: str) -> CodeType | None:
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
        content = Path(cache).read_bytes()
        code = marshal.loads(content[len(head) :]) if content.startswith(head) else None
        if (
            isinstance(code, CodeType) and code.co_filename == path
        ):  # else the folder had another name
            return code
    return None
