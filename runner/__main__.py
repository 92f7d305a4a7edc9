"""`python -m runner`; the console script `runner` comes here too."""

import sys

from runner.main import main

if __name__ == "__main__":
    sys.exit(main())
