"""The time of a step, simulated from the events of its distinct ranks: a rank waits for each message to arrive."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runner.distributed.traffic import RPC
from runner.planning.costs import Costs
from runner.planning.timeline import Message, Operator


@dataclass
class _Rank:
    """The state of a simulated rank. Times are in seconds."""

    events: Sequence[Counter[Operator] | Message]
    position: int = 0  # of the next event
    now: float = 0.0
    busy: float = 0.0  # computing or communicating, not waiting
    rpc: float = 0.0  # communicating by RPC
    received: Counter[int] = field(default_factory=Counter)  # messages, by sender


def simulate(timelines: Mapping[int, Sequence[Counter[Operator] | Message]], costs: Costs) -> tuple[float, float]:
    """Return the time of a step in seconds, and the fraction of it in which a rank waits for others on average.

    Before a collective, a rank does not wait for the others: all ranks are assumed to start it at the same time. A
    parameter server and its trainers wait for each other, so the times of the server and the slowest trainer are added.
    Both count their messages: the time of messages is that of the rank with the most.

    timelines: the events of the distinct ranks, by rank.
    """
    ranks = {rank: _Rank(events) for rank, events in timelines.items()}
    arrivals: dict[tuple[int, int], list[float]] = defaultdict(list)  # times of messages, by sender and receiver
    has_moved = True
    while has_moved:
        has_moved = False
        for number, rank in ranks.items():
            while rank.position < len(rank.events) and _advance(number, rank, ranks, arrivals, costs):
                has_moved = True
    messages_s = max(rank.rpc for rank in ranks.values())
    if messages_s:
        server, *trainers = (rank.now - rank.rpc for rank in ranks.values())
        return messages_s + server + max(trainers, default=0.0), 0.0
    step_s = max(rank.now for rank in ranks.values())
    busy = sum(rank.busy for rank in ranks.values()) / len(ranks)
    return step_s, 1 - busy / step_s if step_s else 0.0


def _advance(
    number: int,
    rank: _Rank,
    ranks: Mapping[int, _Rank],
    arrivals: dict[tuple[int, int], list[float]],
    costs: Costs,
) -> bool:
    """Simulate the next event of a rank. Return False if it receives a message that has not been sent yet."""
    event = rank.events[rank.position]
    if isinstance(event, Counter):
        duration = costs.operators(event)
    elif event.peer is None:
        duration = costs.message(event)
        rank.rpc += duration if event.kind == RPC else 0.0
    elif event.kind == "send":
        duration = 0.0  # the rank does not wait for the end of the transfer
        arrivals[number, event.peer].append(rank.now + costs.message(event))
    elif event.peer in ranks:
        sent, count = arrivals[event.peer, number], rank.received[event.peer]
        if count >= len(sent):
            return False
        rank.received[event.peer] += 1
        rank.now, duration = max(rank.now, sent[count]), 0.0
    else:
        duration = costs.message(event)
    rank.now += duration
    rank.busy += duration
    rank.position += 1
    return True
