"""The entry point of `python -m runner` and of the console script `runner`."""

import atexit
import os
import sys


def main() -> int:
    """Handle signals, run the command of sys.argv, and return the exit status."""
    from runner.distributed.failures.daemon_threads import is_any_running
    from runner.distributed.failures.signals import install_handlers
    from runner.jobs.process_tuning import begin_imports

    install_handlers()  # before torch and the rest are imported
    begin_imports()
    from runner.cli import main as run

    status = run()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the reader of the pipe has closed it; Python would flush again at exit, and change the status
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    # Python would wait for such a thread at exit. A rank also skips Python's finalization, which takes 0.7 s.
    if is_any_running() or "RANK" in os.environ:
        atexit._run_exitfuncs()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
