"""``python -m replay`` is ``b70-replay``."""

import sys

from replay.cli import main

if __name__ == "__main__":
    sys.exit(main())
