"""How a rank that is asked to stop, where the ranks do not vote on it, tells the others: by their store."""

import torch.distributed as dist

KEY = "stopped"


def stop(store: dist.Store | None, why: str) -> str:
    """Tell the ranks that wait for this one, or lose it, why it answers no more. Returns that."""
    if store is not None:
        store.set(KEY, why)
    return why


def stopped(store: dist.Store | None) -> str | None:
    """Why a rank was asked to stop, as the first one said; None where none was."""
    return store.get(KEY).decode() if store is not None and store.check([KEY]) else None
