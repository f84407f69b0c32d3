"""`python -m expt.report ...`: the same as `python -m expt report ...`."""

import sys

from expt.command.command_line import main

if __name__ == "__main__":
    main(["report", *sys.argv[1:]])
