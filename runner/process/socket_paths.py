"""The directory in which multiprocessing creates its sockets."""

import os
import tempfile
from multiprocessing import util

LONGEST = 103  # bytes of a socket's path on macOS; Linux allows 107
ADDED = len("/pymp-XXXXXXXX/listener-XXXXXXXX")  # what multiprocessing appends to the directory of temporary files
SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def shorten_socket_paths() -> None:
    """Let multiprocessing create its sockets in /tmp if their paths would be too long in TMPDIR.

    Python 3.14 does so itself (https://github.com/python/cpython/issues/132124). Started processes inherit the choice,
    and other temporary files stay in TMPDIR.
    """
    if len(os.fsencode(tempfile.gettempdir())) + ADDED <= LONGEST:
        return
    before = tempfile.tempdir
    tempfile.tempdir = next((each for each in SHORT if os.access(each, os.W_OK | os.X_OK)), before)
    try:
        util.get_temp_dir()  # multiprocessing creates the directory once, and removes it at exit
    finally:
        tempfile.tempdir = before
