"""The nearest valid word to one that was typed, for error messages."""

import difflib
from collections.abc import Collection

_LISTED = 12  # a longer list of choices hides the message that it ends


def nearest(word: str, choices: Collection[str]) -> str | None:
    """The choice most like the word; capitals only decide between choices that differ in nothing else."""
    found = difflib.get_close_matches(word.lower(), {choice.lower() for choice in choices}, n=1)
    alike = [choice for choice in choices if choice.lower() in found]
    return max(alike, key=lambda choice: sum(map(str.__eq__, word, choice)), default=None)


def did_you_mean(word: str, choices: Collection[str]) -> str:
    """The end of a message: `; did you mean convnet? (convnet, mlp)`, or the choices alone where none is near."""
    if not choices:
        return ""
    near = nearest(word, choices)
    listed = ", ".join(list(choices)[:_LISTED]) + (", ..." if len(choices) > _LISTED else "")
    return f"; did you mean {near}? ({listed})" if near else f"; choose among: {listed}"
