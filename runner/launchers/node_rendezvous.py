"""The rendezvous of the elastic agents: for a single machine, and for several."""

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _Action,
    _RendezvousContext,
    _RendezvousExitOp,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from runner.distributed.membership import ENDED, FIRST, Refused, gone_key
from runner.distributed.rendezvous import elastic_keys, serve_store
from runner.distributed.world_store import set_tcp_timeouts
from runner.errors import print_messages

END_TIMEOUT_S = 15.0  # for the ranks of this machine to exit by themselves after those of another one have failed
CLOSED = "closed"
POLL_S = 0.2


class OneMachine(StaticTCPRendezvous):
    """The rendezvous of a job on one machine, with the interface of `Nodes`; also that of each of its worlds."""

    is_first = True

    def __init__(self, join_timeout_s: float):
        super().__init__("localhost", 0, rank=0, world_size=1, run_id="runner", timeout=0)
        self._join_timeout_s = join_timeout_s
        self._ranks_store: dist.TCPStore | None = None

    def join(self) -> RendezvousHandler:
        """Serve a store for the ranks of the next world, and return its rendezvous."""
        self._ranks_store = serve_store("localhost", 0, loopback=True, timeout_s=self._join_timeout_s)
        self.master_port = self._ranks_store.port
        return self

    def next_rendezvous(self) -> RendezvousInfo:
        address = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(dist.HashStore(), self.rank, self.world_size, address)

    def continues_without(self, pids: Sequence[int], has_others: bool) -> bool:
        """Return True if the world continues without these processes. has_others: ranks of this machine are running."""
        store = self._ranks_store
        return has_others and store is not None and elastic_keys(store, self.get_run_id()).check([FIRST])

    def end_together(self, has_outcome: bool, is_refused: bool) -> None:
        pass

    def leave(self) -> None:
        pass

    def close(self) -> None:
        self._ranks_store = None


class WorldRendezvous(DynamicRendezvousHandler):
    """The rendezvous of one world over several machines; it is over when a rank fails or a machine joins.

    If the ranks are elastic, it is not over when a rank or a machine is lost, nor when a machine joins once the ranks
    have begun to train: the ranks of that machine wait in the store until the others admit them.
    """

    number: int
    ranks_address: tuple[str, int] | None  # of this rendezvous's store if the ranks are elastic, and use it as well
    node_rank: int | None  # number of this machine; None for the order in which torch sorts the machines
    worlds: list[int]  # receives the number of this machine once all machines have joined
    _is_joined = _has_joined_later = False
    _closed_at = float("inf")  # monotonic seconds

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other machines. Raise RendezvousClosedError when torch's agent calls it for another round."""
        if self._is_joined:
            raise RendezvousClosedError
        if self._has_begun():
            return self._join_later()
        info = super().next_rendezvous()
        self._is_joined, rank = True, info.rank if self.node_rank is None else self.node_rank
        self.worlds.append(rank)
        assert info.bootstrap_store_info is not None
        # torch's store would be lost together with the machine of rank 0.
        address = RendezvousStoreInfo(*self.ranks_address) if self.ranks_address else info.bootstrap_store_info
        return RendezvousInfo(info.store, rank, info.world_size, address)

    def num_nodes_waiting(self) -> int:
        """Return how many machines wait to join; at least 1 if the rendezvous was closed more than END_TIMEOUT_S ago.

        torch's agent then stops its ranks, if they have not noticed the failure of other ranks themselves.
        """
        waiting, now = super().num_nodes_waiting(), time.monotonic()
        if self.is_closed():
            self._closed_at = min(self._closed_at, now)
        elif self._has_begun():  # torch excludes a machine that was silent for 15 s
            with suppress(RendezvousTimeoutError):
                self._take_part(deadline=0)
        return max(waiting, int(now - self._closed_at > END_TIMEOUT_S))

    def continues_without(self, pids: Sequence[int], has_others: bool) -> bool:
        """Return True if the world continues without these processes, which the ranks then know to be killed.

        has_others: ranks of this machine are running.
        """
        with suppress(RuntimeError):  # the store has exited
            if self._has_begun() and (has_others or self._participants() - {self._this_node}):
                for pid in pids:
                    self._keys.set(gone_key(socket.gethostname(), pid), "")
                return True
        return False

    def end_together(self, has_outcome: bool, is_refused: bool) -> None:
        """Wait until the ranks of all machines have exited, because one of the agents serves their store.

        Do not wait for a machine that was silent for 15 s. Raise RendezvousClosedError if the world fails, or if it has
        no ranks left. has_outcome: a rank of this machine has returned an outcome. is_refused: a process of this
        machine was refused as a rank. If a machine that has joined later has no ranks for this reason, raise Refused.
        """
        self._stop_heartbeats()
        with suppress(RendezvousConnectionError):  # the machine with the store has noticed the end first
            with self._heartbeat_lock:
                self._op_executor.run(_RendezvousExitOp(), self._get_deadline(self._settings.timeout.close))
            if is_refused and not has_outcome and self._has_joined_later:
                raise Refused
            if not has_outcome and not self._check(ENDED):
                print_messages([f"no ranks are left on {socket.gethostname()}; waiting for those of other machines"])
            while self._participants():
                if self.is_closed():
                    raise RendezvousClosedError
                time.sleep(POLL_S)
            if not (has_outcome or self._check(ENDED)):  # the last ranks of two machines were lost at once
                raise RendezvousClosedError

    def _join_later(self) -> RendezvousInfo:
        """Take part in the world of the other machines, as soon as fewer than the maximum number do."""
        self._take_part(self._get_deadline(self._settings.timeout.join))
        self._start_heartbeats()
        self._is_joined = self._has_joined_later = True
        self.worlds.append(self._settings.max_nodes)  # a number that no machine of the first world has
        assert self.ranks_address is not None
        # The ranks receive their numbers when the others admit them.
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo(*self.ranks_address))

    def _take_part(self, deadline: float) -> None:
        def next_action(context: _RendezvousContext, deadline: float) -> _Action:
            participants = context.state.participants
            if context.state.closed:
                return _Action.ERROR_CLOSED
            if context.node in participants:
                return _Action.FINISH
            if len(participants) < context.settings.max_nodes:
                return _Action.ADD_TO_PARTICIPANTS
            return _Action.SYNC if time.monotonic() < deadline else _Action.ERROR_TIMEOUT

        with self._heartbeat_lock:
            self._op_executor.run(next_action, deadline)

    def _participants(self) -> set[object]:
        """Return the machines that take part, and were not silent for 15 s."""
        with self._heartbeat_lock:
            self._state_holder.sync()
            return set(self._state_holder.state.participants)

    @property
    def _keys(self) -> dist.Store:
        return elastic_keys(self._store, self.get_run_id())

    def _has_begun(self) -> bool:
        """Return True if the ranks can continue without one that is lost."""
        return self.ranks_address is not None and self._check(FIRST)

    def _check(self, key: str) -> bool:
        try:
            return self._keys.check([key])
        except RuntimeError as error:
            raise RendezvousConnectionError(str(error)) from error


class Nodes:
    """The rendezvous of a job over several machines: one `WorldRendezvous` after another.

    The machines agree on the attempt by a key of the store at the rendezvous's endpoint. torch's own handler could form
    several worlds, but keeps the first one's store for the ranks: that is lost with the machine that serves it, and
    contains the keys of the earlier ranks.

    Raises RendezvousConnectionError if the endpoint cannot be reached, or does not respond for `timeout_s` seconds
    (None: until TCP gives up). `node_rank` is the number of this machine, or None for any number. `is_elastic`: the
    ranks can continue without one of them, or without a machine other than that of the endpoint.
    """

    def __init__(
        self,
        parameters: RendezvousParameters,
        timeout_s: float | None = None,
        node_rank: int | None = None,
        is_elastic: bool = False,
    ):
        _, self._store = create_backend(parameters)
        if timeout_s is not None:
            set_tcp_timeouts(self._store, timeout_s)
        self._parameters, self._key = parameters, f"runner.attempt.{parameters.run_id}"
        self._node_rank = node_rank
        host, _, port = parameters.endpoint.rpartition(":")
        self._ranks_address = (host, int(port)) if is_elastic else None
        self._attempts: list[WorldRendezvous] = []
        self.worlds: list[int] = []  # the number of this machine in each world so far

    @property
    def is_first(self) -> bool:
        """Return True if this machine has rank 0."""
        return self.worlds[-1] == 0

    def join(self) -> WorldRendezvous:
        """Return the current attempt. Raise RendezvousClosedError if the job is over."""
        number = self._exchange("", "0")
        if number == CLOSED:
            raise RendezvousClosedError
        attempt = self._attempt(int(number))
        # This keeps the store of the previous attempt, which is served until all of its ranks have exited.
        self._attempts = [*self._attempts[-1:], attempt]
        return attempt

    def leave(self) -> None:
        """Let all machines continue with the next attempt, once this one has failed or a machine joins."""
        attempt = self._attempts[-1]
        attempt.shutdown()
        self._exchange(str(attempt.number), str(attempt.number + 1))

    def close(self) -> None:
        """End the job on all machines."""
        with suppress(RendezvousError):
            number = self._exchange("", CLOSED)
            if number != CLOSED:
                self._exchange(number, CLOSED)
                self._attempt(int(number)).set_closed()  # other machines may wait there already
            for attempt in self._attempts:
                attempt.shutdown()

    def _attempt(self, number: int) -> WorldRendezvous:
        parameters = self._parameters
        run_id = f"{parameters.run_id}.{number}"
        join_s, last_call_s = (float(parameters.get(f"{name}_timeout")) for name in ("join", "last_call"))
        attempt: WorldRendezvous = WorldRendezvous.from_backend(
            run_id,
            self._store,
            C10dRendezvousBackend(self._store, run_id),
            parameters.min_nodes,
            parameters.max_nodes,
            parameters.local_addr,
            RendezvousTimeout(join=timedelta(seconds=join_s), last_call=timedelta(seconds=last_call_s)),
        )
        attempt.number, attempt.node_rank, attempt.worlds = number, self._node_rank, self.worlds
        attempt.ranks_address = self._ranks_address
        return attempt

    def _exchange(self, expected: str, desired: str) -> str:
        """Replace the key's value if it is the expected one. Return the value after that."""
        try:
            return self._store.compare_set(self._key, expected, desired).decode()
        except RuntimeError as error:
            raise RendezvousConnectionError(str(error)) from error


Rendezvous = OneMachine | Nodes  # the rendezvous of a job, whose `join` returns that of the next world
