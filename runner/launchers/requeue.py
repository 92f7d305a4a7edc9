"""Scripts that wait in a queue may name this module by its older path; it is runner.launchers.slurm.requeue."""

import sys

from runner.launchers.slurm.requeue import main

if __name__ == "__main__":
    sys.exit(main())
