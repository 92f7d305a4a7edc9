"""Where the agents of several nodes meet: torch's c10d rendezvous, with a new store for the ranks of each round."""

import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from runner.launchers.rank_process import END_TIMEOUT_S

BACKEND = "runner"  # the name by which torch's agent finds it
DEAD_NODE_S = 20  # until a node that says nothing is taken for lost: three heartbeats of 5 s, and noticing it
EXIT_S = 300.0  # that an agent whose ranks have ended well waits for those of other nodes, by torch's default
PROBE_S = 1.0


class Meeting(DynamicRendezvousHandler):
    """torch keeps the ranks' store of the first round, on the node of rank 0, for the rounds after it.

    With that node the store is lost, to those who did not become rank 0; and a node that comes anew reads there what
    earlier ranks have left.
    """

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        last_words = self._shared_tcp_store_server  # it serves ranks of other nodes until those are here too
        self._bootstrap_store_info = self._shared_tcp_store_server = None
        try:
            return super().next_rendezvous()
        finally:
            del last_words


def _meet(parameters: RendezvousParameters) -> RendezvousHandler:
    backend, store = create_backend(parameters)
    join_s, last_call_s = (float(parameters.get(f"{name}_timeout")) for name in ("join", "last_call"))
    timeout = RendezvousTimeout(join=timedelta(seconds=join_s), last_call=timedelta(seconds=last_call_s))
    return Meeting.from_backend(
        parameters.run_id,
        store,
        backend,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        timeout,
    )


rendezvous_handler_registry.register(BACKEND, _meet)


@contextmanager
def ending_when_lost(
    host: str, port: int, patience_s: float, had_ranks: threading.Event, last_word: Callable[[bool], str]
) -> Iterator[None]:
    """End this process when it has no ranks and is cut off from the rendezvous; the event says if it has had any.

    Or when it has had none for too long, though the rendezvous answers: `last_word` is given whether it does.

    An agent asks the rendezvous' store all the time, and one that is cut off from it waits for the answer
    for as long as TCP does, whatever becomes of its ranks. patience_s: that meeting takes at most.
    """
    back = threading.Event()

    def watch() -> None:
        answered = last = time.monotonic()
        while not back.wait(PROBE_S / 2):
            now = time.monotonic()
            if multiprocessing.active_children():
                answered = last = now
                had_ranks.set()
            elif not had_ranks.is_set() or port == 0 or _answers(host, port):
                answered = now
            answers = now - answered < END_TIMEOUT_S
            if answers and now - last < max(patience_s, EXIT_S) + END_TIMEOUT_S:
                continue
            print(last_word(answers), file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        back.set()


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=PROBE_S).close()
    except OSError:
        return False
    return True
