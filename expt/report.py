"""`python -m expt.report ...`: the same as `python -m expt report ...`."""

import sys

from expt.command.main import main

if __name__ == "__main__":
    main(["report", *sys.argv[1:]])
