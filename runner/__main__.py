"""The entry point of `python -m runner` and of the console script `runner`."""

import atexit
import contextlib
import os
import signal
import sys


def main() -> int:
    """Handle signals, run the command of sys.argv, and return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would print a traceback during the next import
    from runner.distributed.failures.signals import install_handlers
    from runner.jobs.process_tuning import begin_imports
    from runner.process.standard_streams import open_streams

    open_streams()
    install_handlers()  # before torch and the rest are imported
    begin_imports()
    from runner.cli import main as run

    status = run()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the pipe is closed; Python would flush again at exit, and change the status
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    # A rank skips Python's finalization: it takes 0.7 s, and torch aborts the process if a thread waits for the store.
    # Ray aborts it too, if its thread still tries to reach an address that is not a cluster.
    if "RANK" in os.environ or "SLURM_STEP_ID" in os.environ or "ray" in sys.modules:
        atexit._run_exitfuncs()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
