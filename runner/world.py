"""Who this process is among the ranks of a run: its device, store and process group, and the few collectives."""

import gc
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runner.backend import Backend
from runner.failure import ANSWER_TIMEOUT_S, first_failure, within
from runner.launchers.env import Place
from runner.launchers.network import choose_interface, listening_on

SPEAK_TIMEOUT_S = 15.0


class World:
    """One rank's view. It is joined once per process; each job of a sweep then forms a process group of its own.

    `connection` is None in a world of one, where every collective is the identity.
    """

    def __init__(self, place: Place, connection: dist.Store | None, backend: Backend):
        self.place = place
        self.rank, self.world_size = place.rank, place.world_size
        self.local_rank = place.local_rank
        self.backend = backend
        self.device = torch.device("cpu")  # where the samples are
        self.devices = [self.device]  # all that are this rank's own
        self.connection = connection
        # A restarted world must not read what the one before it left in an agent's store (pytorch issue 135712).
        self._root = None if connection is None else dist.PrefixStore(f"attempt{place.restart}", connection)
        self._jobs = 0
        self._store: dist.Store | None = self._root
        self._failed = False
        self._leaving: list[Callable[[bool], None]] = []

    # -- one job after another -------------------------------------------------------------------------------------

    def begin_job(self, backend: Backend) -> None:
        """Start a job with keys of its own in the store. All ranks must call it."""
        self.backend, self._failed = backend, False
        if self._root is not None:
            self._store = dist.PrefixStore(f"job{self._jobs}", self._root)
            self._store.set(f"host/{self.rank}", socket.gethostname())
        self._jobs += 1

    def form_group(self) -> None:
        """Initialise the process group and the device. All ranks must call it; needed also in a world of one by DDP."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._listen()
        dist.init_process_group(
            self.backend.process_group_backend(),
            store=self.store("group"),
            rank=self.rank,
            world_size=self.world_size,
            timeout=self.backend.timeout,
            device_id=self.device if self.device.type == "cuda" else None,
        )
        # gloo returns before its peers have connected: one that leaves early would fail the others in here.
        self.sum(torch.zeros(1))

    def _listen(self) -> None:
        """Choose the network interface until the group is left: later groups are made on it too."""
        interface, libraries = choose_interface(self.place, self.backend.interface, self.store("addresses"))
        chosen = ExitStack()
        chosen.enter_context(listening_on(interface, libraries, override=self.backend.interface is not None))
        self.at_leave(lambda well: chosen.close())

    def leave_group(self) -> None:
        """Destroy the process group, where there is one.

        Whatever holds it (a DDP module) must be unreachable by now: a live one makes the process abort at its exit
        now and then (pytorch issue 190489).
        """
        while self._leaving:
            self._leaving.pop()(not self._failed)
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()

    def at_leave(self, act: Callable[[bool], None]) -> None:
        """Act before this job's group is left; told whether the job went well on this rank. It must not raise."""
        self._leaving.append(act)

    def store(self, topic: str) -> dist.Store:
        """This job's keys of one topic."""
        return dist.HashStore() if self._store is None else dist.PrefixStore(topic, self._store)

    def choose_device(self) -> list[str]:
        """Take this rank's devices; what is wrong with them, one message each. All ranks must call it."""
        messages = self.backend.check()
        on_gpu = not messages and self.backend.device_type() == "cuda"
        each, num_ranks = self.backend.devices_per_rank, self.place.local_world_size
        # Slurm may let each of its tasks see its own GPU alone, as --gpus-per-task=1 does.
        seen = range(each) if on_gpu and num_ranks > 1 and torch.cuda.device_count() == each else ()
        uuids = {str(torch.cuda.get_device_properties(number).uuid) for number in seen}
        others = self.others_here("gpus", json.dumps(sorted(uuids)))
        if messages:
            return messages
        if not on_gpu:
            self.device = torch.device("cpu")
            self.devices = [self.device] * each
            return []
        bound = bool(uuids) and uuids.isdisjoint(itertools.chain.from_iterable(map(json.loads, others)))
        first = 0 if bound else self.local_rank * each
        if (uuids and not bound) or first + each > torch.cuda.device_count():
            need = "a GPU each" if each == 1 else f"{each} GPUs each, {num_ranks * each} together"
            return [
                f"{num_ranks} ranks on this machine need {need}, but there are {torch.cuda.device_count()}; "
                "start fewer, or try backend=gloo"
            ]
        self.devices = [torch.device("cuda", first + number) for number in range(each)]
        self.device = self.devices[0]
        return []

    def others_here(self, topic: str, text: str) -> Iterator[str]:
        """What the other ranks on this machine say, waited for as it is read. All ranks must call it."""
        store, host, number_here = self.store(topic), socket.gethostname(), self.place.local_world_size
        own = store.add(host, 1)  # not by local_rank: people give several ranks the same, with a GPU of their own each
        store.set(f"{host}/{own}", text)
        return (store.get(f"{host}/{other}").decode() for other in range(1, number_here + 1) if other != own)

    # -- agreement through the store, before there is a process group ----------------------------------------------

    def agree(self, topic: str, messages: list[str]) -> list[str]:
        """The messages of the lowest rank that has any, on every rank. All ranks must call it."""
        if self._store is None:
            return messages
        self._store.set(f"{topic}/{self.rank}", json.dumps(messages))
        if self.rank == 0:
            verdicts = self._all_ranks(topic)
            self._store.set(f"{topic}/all", json.dumps(next((v for v in verdicts if v), [])))
        return json.loads(self._get(f"{topic}/all"))

    def share(self, topic: str, make: Callable[[], str]) -> str:
        """What `make` returned on rank 0, on every rank. All ranks must call it.

        Raises ValueError on every rank when it raised a ValueError or an OSError on rank 0.
        """
        made, refused = "", []
        if self.rank == 0:
            try:
                made = make()
            except (ValueError, OSError) as error:
                refused.append(str(error))
            if self._store is not None:
                self._store.set(topic, made)
        if refused := self.agree(f"{topic}/made", refused):
            raise ValueError(refused[0])
        return made if self._store is None else self._get(topic)

    def share_once(self, topic: str, make: Callable[[], str]) -> str:
        """As share; a world that its agent has started again gets what the first one made."""
        if self.connection is None:
            return self.share(topic, make)
        kept = dist.PrefixStore(f"kept/job{self._jobs}", self.connection)

        def make_once() -> str:
            if self.place.restart and kept.check([topic]):
                return kept.get(topic).decode()
            made = make()
            kept.set(topic, made)
            return made

        return self.share(topic, make_once)

    def in_turn(self, topic: str, act: Callable[[], None]) -> None:
        """Act on rank 0, then on the first rank of every other node, then on the rest. All ranks must call it.

        What the first has fetched into a shared folder is there for the next. An act must not raise.
        """
        turns = (self.rank == 0, self.rank != 0 and self.local_rank == 0, self.local_rank != 0)
        for number, mine in enumerate(turns):
            if mine:
                act()
            self.agree(f"{topic}/turn{number}", [])

    def _all_ranks(self, topic: str) -> list[list[str]]:
        assert self._store is not None
        deadline = time.monotonic() + self.backend.timeout_s
        verdicts, absent = [], []
        for rank in range(self.world_size):
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.01))
            try:
                self._store.wait([f"{topic}/{rank}"], left)
            except RuntimeError:
                absent.append(rank)
                continue
            verdicts.append(json.loads(self._store.get(f"{topic}/{rank}")))
        if absent:
            raise TimeoutError(
                f"ranks {absent} of {self.world_size} said nothing ({topic}) for {self.backend.timeout_s:g} s"
            )
        return verdicts

    def _get(self, key: str) -> str:
        assert self._store is not None
        # Rank 0 answers after it has waited for everybody, so a rank that waits for rank 0 waits a little longer.
        self._store.wait([key], self.backend.timeout + timedelta(seconds=SPEAK_TIMEOUT_S))
        return self._store.get(key).decode()

    # -- how a run ends --------------------------------------------------------------------------------------------

    def report_failure(self, text: str, misses_peer: bool = False) -> str:
        """Tell the world why this rank fails; the first rank's text, which is the cause of the others'."""
        self._failed = True
        if self._store is None:
            return text
        store = self._store
        told = within(ANSWER_TIMEOUT_S, lambda: first_failure(store, self.rank, self.world_size, text, misses_peer))
        if told is not None:
            return told
        self.connection = self._root = self._store = None
        where = f"{self.place.master_addr}:{self.place.master_port}"
        return f"{text}\nand nothing answers at {where}, where the ranks met: that machine has ended or is cut off"

    def speak(self, say: Callable[[], None]) -> None:
        """Let rank 0 say something to the user; the others go on when it has, or after a bounded wait.

        A launcher that sees one rank exit with an error ends the others at once, rank 0 in mid-sentence too.
        """
        if self.rank == 0:
            say()
        if self._root is None:
            return
        try:
            if self.rank == 0:
                self._root.set("spoken", "")
            else:
                self._root.wait(["spoken"], timedelta(seconds=SPEAK_TIMEOUT_S))
        except RuntimeError:
            pass

    def close(self) -> None:
        """Leave the store; the rank that serves it stays until the others have left, or for a bounded time."""
        if self._root is None:
            return
        try:
            self._root.add("closed", 1)
            if self.place.hosts_store:
                deadline = time.monotonic() + SPEAK_TIMEOUT_S
                while self._root.add("closed", 0) < self.world_size and time.monotonic() < deadline:
                    time.sleep(0.01)
        except RuntimeError:
            pass
        self.connection = self._root = self._store = None

    def mesh(self, **axes: int) -> DeviceMesh:
        """The mesh with these named axes, slowest first. All ranks must call it, when the group is formed."""
        return init_device_mesh(self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    # -- collectives -----------------------------------------------------------------------------------------------

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor summed over all ranks, in place. All ranks must call it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any_later(self, flag: bool) -> Callable[[], bool]:
        """Start asking whether the flag is set on any rank; call the result for the answer. All ranks must call it.

        It runs on the CPU beside whatever comes next, so that nobody waits for a device to ask.
        """
        if self.world_size == 1:
            return lambda: flag
        votes = torch.tensor([int(flag)], dtype=torch.int32)
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None

        def answer() -> bool:
            work.wait()
            return bool(votes.item())

        return answer
