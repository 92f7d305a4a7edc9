"""`python -m runner`; the console script `runner` comes here too."""

import sys

from runner.entry import main

if __name__ == "__main__":
    sys.exit(main())
