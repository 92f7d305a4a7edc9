"""The process that mirrors a run directory, in the process of the run that starts it and reads its reports."""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.errors import InputError, JobFailed, print_messages, quantity
from runner.remote.address import Address

COMMAND = (sys.executable, "-m", "runner.checkpoints.mirror")  # of a layer above, which knows what a checkpoint is
DISCARD = "discard"  # the last line of the input, if the process has to delete what it has uploaded
_MAX_NAMED = 4


class MirrorProcess:
    """A process that mirrors one directory to an address. Call `begin`, and at the end of the run `end`.

    Args:
        outputs: the address of all runs.
        options: those of obstore.
        patience_s: how long the store may fail before the run fails.

    Raises:
        InputError: if the store cannot be used.
    """

    def __init__(self, outputs: str, options: Mapping[str, Any], patience_s: float):
        self.outputs, self._failed, self._directory, self._last = outputs, "", "", dict[str, Any]()
        self.address = ""  # of the run, from `begin` on
        self.num_retries = 0  # requests of this machine that were repeated
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it may outlive a killed run, whose caller waits for the end of its output
            text=True,
            start_new_session=True,  # Ctrl-C and a signal to the run's group must not interrupt its uploads
        )
        self._exchange(outputs=outputs, options=dict(options), patience_s=patience_s)

    def begin(self, directory: Path, address: Address, is_part: bool = False) -> None:
        """Lock the address, and mirror the directory to it. Raise InputError if another run has locked it.

        is_part: rank 0, which has a copy of the directory on another machine, has locked the address.
        """
        self._directory, self.address = str(directory), str(address)
        self._exchange(directory=self._directory, address=self.address, is_part=is_part)
        self._reader = threading.Thread(target=self._read, daemon=True, name="mirror")
        self._reader.start()

    def check(self) -> None:
        """Raise JobFailed if the store has failed for too long, or if the lock of the address is lost."""
        if self._failed:
            raise JobFailed(self._failed)

    def end(self, is_discarded: bool = False) -> list[str]:
        """Upload what is left, which takes up to the patience if the store fails. Return a message if files are left.

        Without `begin`, only end the process. is_discarded: delete what was uploaded instead.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        if not self._process.stdin.closed:  # otherwise the store has been refused
            with suppress(OSError):
                # A line, because forked processes, such as loader workers, may keep the pipe open.
                self._process.stdin.write(f"{DISCARD if is_discarded else ''}\n")
                self._process.stdin.close()
        self._process.wait()
        if not self._directory:
            self._process.stdout.close()
            return []
        self._reader.join()  # it reads the last report
        if not self._last:
            return [f"outputs={self.outputs}: its upload has ended unexpectedly; resume={self._directory} continues it"]
        if left := self._last["left"]:
            named = ", ".join(left[:_MAX_NAMED]) + (", ..." if len(left) > _MAX_NAMED else "")
            reason = self._last["error"] or self._failed
            where = f"{self._directory} has them, and resume={self._directory} uploads them"
            return [f"{quantity(len(left), 'item')} could not be uploaded: {named}; {where}", reason]
        return []

    def _exchange(self, **message: Any) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        line = ""
        with suppress(OSError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"refused": [f"outputs={self.outputs}: its upload could not be started"]}
        if refused := answer.get("refused"):
            self._directory = ""
            self.end()
            raise InputError(*refused)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                message = json.loads(line)
                self._failed = message.get("failed") or self._failed
                self.num_retries = message.get("retries", self.num_retries)
                if "left" in message:
                    self._last = message
        if not self._last and not self._failed:
            self._failed = f"outputs={self.outputs}: the process that uploads the run has ended unexpectedly"


def report_left(messages: list[str], is_successful: bool) -> None:
    """Print what could not be uploaded. Raise JobFailed instead if the run has ended well."""
    if messages and is_successful:
        raise JobFailed("\n".join(messages))
    print_messages(messages)
