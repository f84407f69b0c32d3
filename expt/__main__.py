"""The command line: `python -m expt KEY=VALUE ...`, `python -m expt report ...`, and the console script `expt`."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from expt.command import command_line

TYPED_AT = time.monotonic()


def main() -> None:
    """Run the command in sys.argv, and exit; see expt.command.command_line."""
    if not getattr(sys.flags, "safe_path", False):
        with contextlib.suppress(OSError):  # a folder that is gone
            if (here := os.getcwd()) not in sys.path:  # as `python -m expt` has it, for a person's own classes
                sys.path.insert(0, here)
    command_line.main(sys.argv[1:], typed_at=TYPED_AT)


if __name__ == "__main__":
    main()
