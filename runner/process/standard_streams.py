"""The standard streams of a command: open, and able to write every character."""

import io
import os
import sys


def open_streams() -> None:
    """Open /dev/null in place of a closed stream, and replace characters that the encoding of a stream lacks.

    Call it at the first line of a process: otherwise, the next file or socket receives the descriptor of the closed
    stream, and libraries write their output into it.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, descriptor)  # also makes it inheritable
            if null != descriptor:
                os.close(null)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115
        elif descriptor and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for example with PYTHONIOENCODING=ascii
