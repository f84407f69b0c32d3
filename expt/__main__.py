"""The command line: `python -m expt KEY=VALUE ...`, `python -m expt report ...`, and the console script `expt`."""

from __future__ import annotations

import sys
import time

from expt.command import command_line

TYPED_AT = time.monotonic()


def main() -> None:
    """Run the command in sys.argv, and exit; see expt.command.command_line."""
    command_line.main(sys.argv[1:], typed_at=TYPED_AT)


if __name__ == "__main__":
    main()
