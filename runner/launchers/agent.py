"""Scripts that wait in a queue may name this module by its older path; it is runner.launchers.slurm.agent."""

import sys

from runner.launchers.slurm.agent import run

if __name__ == "__main__":
    sys.exit(run())
