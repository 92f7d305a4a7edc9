"""How a rank that fails finds out, by the store, which rank failed first and which have gone without a word."""

import contextlib
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

LAST_WORD_S = 5.0  # for ranks that miss the same peer as this one, to say so
# gloo's errors are plain RuntimeErrors, most of which name a file of its own.
GLOO_SAYS = ("gloo/", "caused pair closure", "Connection closed by peer", "Connection reset by peer")
ANSWER_TIMEOUT_S = LAST_WORD_S + 5.0  # for the store, whose machine may be gone


def misses_peer(error: BaseException) -> bool:
    """Whether it is about a rank that no longer answers: whoever raises it is not the cause."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in GLOO_SAYS)


def first_failure(store: dist.Store, rank: int, world_size: int, text: str, misses_peer: bool) -> str:
    """The text of the rank that failed first, the cause of the others'; one that misses a peer adds whom.

    `store` is the job's own, where each rank keeps its host's name under host/RANK.
    """
    store.set(f"failed/{rank}", "")
    if misses_peer and (silent := _silent(store, world_size)):
        text += "\n" + "\n".join(f"no word from rank {other} on {_host(store, other)}" for other in silent)
    return store.compare_set("failure", "", text).decode()


def within(timeout_s: float, act: Callable[[], str]) -> str | None:
    """What it returns; None where it raises a RuntimeError or takes longer, as asking a store that is cut off does."""
    answers: list[str] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(act())

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else None


def _silent(store: dist.Store, world_size: int) -> list[int]:
    deadline = time.monotonic() + LAST_WORD_S
    while True:
        silent = [rank for rank in range(world_size) if not store.check([f"failed/{rank}"])]
        if not silent or store.check(["failure"]) or time.monotonic() > deadline:
            return silent
        time.sleep(0.05)


def _host(store: dist.Store, rank: int) -> str:
    key = f"host/{rank}"
    return store.get(key).decode() if store.check([key]) else "an unknown host"
