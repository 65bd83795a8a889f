"""`python -m gossamer`, which torchrun needs; the same as the command `gossamer`."""

import sys

from gossamer.cli import main

sys.exit(main())
