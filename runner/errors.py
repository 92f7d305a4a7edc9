"""How a command ends early, and how wrong input is told: in three lines at most, with the nearest right word."""

import contextlib
import difflib
import sys
from collections.abc import Collection, Sequence

_LISTED = 12  # a longer list of choices hides the message that it ends


class InputError(ValueError):
    """What the user asked for cannot be done; each message is one line with key, value, rule and fix."""

    def __init__(self, *messages: str):
        super().__init__("\n".join(messages))
        self.messages = list(messages)


class JobFailed(Exception):
    """The job ended with an error, which the user has been told and result.json keeps.

    status: to exit with. directory: of the run or sweep, for who has called it from Python. follows: another rank may
    be the cause, and speaks first.
    """

    def __init__(self, text: str, status: int = 1, directory: str = "", follows: bool = False):
        super().__init__(text)
        self.status, self.directory, self.follows = status, directory, follows


class Preempted(Exception):
    """A signal asked the run to stop; it has saved what its last step made. directory: as of JobFailed."""

    def __init__(self, text: str = "", directory: str = ""):
        super().__init__(text)
        self.directory = directory


def tell(messages: Sequence[str]) -> None:
    """Say what is wrong with the input, in three lines at most."""
    for line in three_lines(messages):
        with contextlib.suppress(OSError):  # nobody reads it any more
            print(line, file=sys.stderr, flush=True)


def three_lines(messages: Sequence[str]) -> list[str]:
    return list(messages) if len(messages) <= 3 else [*messages[:2], f"... and {len(messages) - 2} more"]


def nearest(word: str, choices: Collection[str]) -> str | None:
    """The choice most like the word; capitals only decide between choices that differ in nothing else."""
    found = difflib.get_close_matches(word.lower(), {choice.lower() for choice in choices}, n=1)
    alike = [choice for choice in choices if choice.lower() in found]
    return max(alike, key=lambda choice: sum(map(str.__eq__, word, choice)), default=None)


def near_hint(word: str, choices: Collection[str]) -> str:
    """The end of a message: `; did you mean convnet?`, or nothing where none is near."""
    near = nearest(word, choices)
    return f"; did you mean {near}?" if near else ""


def did_you_mean(word: str, choices: Collection[str]) -> str:
    """The end of a message: `; did you mean convnet? (convnet, mlp)`, or the choices alone where none is near."""
    if not choices:
        return ""
    hint = near_hint(word, choices)
    listed = ", ".join(list(choices)[:_LISTED]) + (", ..." if len(choices) > _LISTED else "")
    return f"{hint} ({listed})" if hint else f"; choose among: {listed}"
