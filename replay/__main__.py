"""``python -m replay`` is ``b70-replay``."""

import sys

from replay.cli import main


def entry() -> None:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    entry()
