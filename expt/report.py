"""`python -m expt.report FOLDER ...`: what `expt report` prints; see expt.command.report."""

from __future__ import annotations

from expt.command.report import main

if __name__ == "__main__":
    main()
