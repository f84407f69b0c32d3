"""`python -m expt KEY=VALUE ...`, `python -m expt report ...`, and the console script `expt`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

TYPED_AT = time.monotonic()


def main() -> None:
    """Run the command in sys.argv, and exit; see expt.command.main."""
    # LC_ALL=C without the mode that is for it; -X utf8=0 forbids that.
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Before and after the command, as it imports and exits, Ctrl-C ends it without traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from expt.command import main as command

    if not getattr(sys.flags, "safe_path", False):
        with contextlib.suppress(OSError):  # a folder that is gone
            if (here := os.getcwd()) not in sys.path:  # for custom classes
                sys.path.insert(0, here)
    command.main(sys.argv[1:], typed_at=TYPED_AT)


if __name__ == "__main__":
    main()
