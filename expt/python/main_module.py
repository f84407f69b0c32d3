"""A class that a notebook's cell or a script has defined in `__main__`, as a module that workers
can import.

No worker has that `__main__`, and to run a script again would start another run. So the text of the
class becomes a module, with the imports, constants and other definitions that it uses. What comes
of it is compared with the class that was given, instruction by instruction: one that is not the
same is refused."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from expt.config import main_code
from expt.errors import ConfigError
from expt.python.definition import Definition, Unknown, definition_of
from expt.python.globals_used import NotKept, line_for
from expt.python.same_code import Comparison

Named = type | types.FunctionType
MEND = (
    "put it into a file, as with %%writefile mine.py at the top of a cell, and import it from there"
)


def dotted(key: str, cls: type) -> str:
    """The name by which workers import `cls` of `__main__`.

    Raises ConfigError where none would be the same class.
    """
    try:
        return f"{_module_of(cls, ())}.{cls.__name__}"
    except (Unknown, NotKept) as error:
        mend = f"{error.mend}, or " if isinstance(error, NotKept) and error.mend else ""
        raise ConfigError(f"{key}={cls.__name__}: {error}; {mend}{MEND}") from None


def _module_of(named: Named, above: tuple[Named, ...]) -> str:
    """The module of a class or a function, and those of what it uses; `above` are those that use
    it.
    """
    definition = definition_of(named)
    lines, own = [], []
    there = vars(sys.modules["__main__"])
    for name in sorted((definition.names & there.keys()) - {named.__name__}):
        value = there[name]
        if name.startswith("__"):  # __name__, which each module has
            continue
        if isinstance(value, type | types.FunctionType) and value.__module__ == "__main__":
            if value in above:
                raise NotKept(f"it and {name} use each other")
            own.append((name, value))
        else:
            lines.append(line_for(definition, name, value))
    _refuse_renewed_base(named)
    for name, value in own:
        lines.append(_import_of(name, value, (*above, named)))
    module = main_code.write(_text(definition, lines))
    _refuse_other(named, definition, module)
    return module


def _import_of(name: str, value: Named, above: tuple[Named, ...]) -> str:
    if value.__name__ == "<lambda>":
        raise NotKept(
            f"it uses {name}, a lambda, which has no text of its own", "write it as a def"
        )
    if value.__qualname__ != value.__name__:
        raise NotKept(f"it uses {name}, which is defined inside a function")
    called = "" if name == value.__name__ else f" as {name}"
    return f"from {_module_of(value, above)} import {value.__name__}{called}"


def _text(definition: Definition, lines: list[str]) -> str:
    future = ["from __future__ import annotations"] if definition.annotations_are_texts else []
    imports = sorted(line for line in lines if line.startswith(("import ", "from ")))
    constants = sorted({*lines} - {*imports})
    blocks = [*future, "\n".join(imports), "\n".join(constants), definition.text]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _refuse_renewed_base(named: Named) -> None:
    for base in named.__bases__ if isinstance(named, type) else ():
        now = getattr(sys.modules["__main__"], base.__name__, base)
        if base.__module__ == "__main__" and now is not base:
            raise NotKept(
                f"{base.__name__} has been defined anew since",
                f"run the cell of {named.__name__} again",
            )


def _refuse_other(named: Named, definition: Definition, module: str) -> None:
    """Raise NotKept where the class or function of `module` is not the one that was given."""
    try:
        written: Any = getattr(importlib.import_module(module), named.__name__)
    except Exception as error:  # whatever a person's own code raises
        raise NotKept(
            f"its text alone cannot be imported ({type(error).__name__}: {error})"
        ) from error
    if found := Comparison(definition.codes).difference(named, written):
        text = (
            f"its text is not what it is now ({found} differs): it, or what it uses, has changed"
            " since"
        )
        raise NotKept(text, "run its cell again")
