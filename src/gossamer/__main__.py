"""`python -m gossamer`, which torchrun needs; the same as the command `gossamer`."""

import sys

from gossamer.cli import main

if __name__ == "__main__":  # a process that is started by another imports this module too
    sys.exit(main())
