"""`python -m asyncengine` is the `asyncengine` command."""

import sys

from asyncengine.cli import main

if __name__ == "__main__":
    sys.exit(main())
