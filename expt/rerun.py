"""`python -m expt.rerun ...`: the same as `python -m expt rerun ...`.

From Python it is `expt.rerun`, see expt.api.
"""

import sys

from expt.command.main import main

if __name__ == "__main__":
    main(["rerun", *sys.argv[1:]])
