"""`python -m runner`; the console script `runner` comes here too."""

import atexit
import contextlib
import os
import sys


def main() -> int:
    """Run what sys.argv asks for, and hear signals meanwhile. Returns the exit status."""
    from runner.distributed.left_waiting import is_one_left
    from runner.distributed.signals import listen
    from runner.launchers.imported import begin_imports

    listen()  # before torch and the rest are imported
    begin_imports()
    from runner.main import main as run

    status = run()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads it any more; Python would try again, and end with a status of its own
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if is_one_left():  # Python would go through its exit with it
        atexit._run_exitfuncs()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
