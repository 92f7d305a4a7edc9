"""The time of a step, from what each distinct rank does: a rank waits for the messages that it receives."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runner.distributed.traffic import RPC
from runner.planning.costs import Costs
from runner.planning.timeline import Message, Operator


@dataclass
class _Rank:
    events: Sequence[Counter[Operator] | Message]
    position: int = 0
    now: float = 0.0
    busy: float = 0.0  # computing or communicating, not waiting
    received: Counter[int] = field(default_factory=Counter)  # messages, by sender


def simulate(timelines: Mapping[int, Sequence[Counter[Operator] | Message]], costs: Costs) -> tuple[float, float]:
    """Return the seconds of a step, and the fraction of it in which a rank waits for others on average.

    timelines: of the distinct ranks, by rank. Collectives start on all ranks at once. The server of RPC and a trainer
    take turns, because each waits for the other.
    """
    ranks = {rank: _Rank(events) for rank, events in timelines.items()}
    arrivals: dict[tuple[int, int], list[float]] = defaultdict(list)  # of messages, by sender and receiver
    has_moved = True
    while has_moved:
        has_moved = False
        for number, rank in ranks.items():
            while rank.position < len(rank.events) and _advance(number, rank, ranks, arrivals, costs):
                has_moved = True
    events = [event for rank in ranks.values() for event in rank.events]
    times = [rank.now for rank in ranks.values()]
    if any(isinstance(event, Message) and event.kind == RPC for event in events):
        server, trainers = times[0], times[1:]
        return server + max(trainers, default=0.0), 0.0
    step_s = max(times)
    busy = sum(rank.busy for rank in ranks.values()) / len(ranks)
    return step_s, 1 - busy / step_s if step_s else 0.0


def _advance(
    number: int,
    rank: _Rank,
    ranks: Mapping[int, _Rank],
    arrivals: dict[tuple[int, int], list[float]],
    costs: Costs,
) -> bool:
    """Let a rank do its next event. Return False if it has to wait for a message that is not sent yet."""
    event = rank.events[rank.position]
    if isinstance(event, Counter):
        duration = costs.operators(event)
    elif event.peer is None:
        duration = costs.message(event)
    elif event.kind == "send":
        duration = 0.0  # sent in the background
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
