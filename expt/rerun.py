"""`python -m expt.rerun FOLDER [NEW_FOLDER]`: repeat a run. From Python it is `expt.rerun`, see expt.api."""

from __future__ import annotations

import sys

from expt import api, signals
from expt.errors import ConfigError, ExptError, Interrupted
from expt.launch import forkserver


def main() -> None:
    """Repeat the run whose folder is in sys.argv; exit as `python -m expt` does."""
    try:
        if not 2 <= len(sys.argv) <= 3:
            raise ConfigError("usage: python -m expt.rerun FOLDER [NEW_FOLDER], as in outputs/2026-11-21/10-00-00")
        api.rerun(*sys.argv[1:])
    except ExptError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(signals.exit_code() if isinstance(error, Interrupted) else error.exit_code)
    except KeyboardInterrupt:
        sys.exit(signals.exit_code())
    finally:
        forkserver.kill()


if __name__ == "__main__":
    main()
