"""The agents of several machines: which of them are started again, and when the others are stopped."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from runner.launchers import agent_group
from runner.launchers.agent_group import AgentGroup

LOST = 255


class Agent:
    """An agent that runs until it is signaled, or for a number of looks at its status, and then has this status."""

    def __init__(self, status: int | None = None, after: int = 0):
        self._end, self._after = status, after

    @property
    def status(self) -> int | None:
        self._after -= 1
        return self._end if self._after < 0 else None

    def send_signal(self, number: int) -> None:
        self._end, self._after = 128 + number, 0

    def close(self) -> None:
        pass

    kill = close


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AgentGroup]:
    for name in ("POLL_S", "RETRY_S", "FAILED_S"):
        monkeypatch.setattr(agent_group, name, 0.0)

    def make(
        *agents: list[Agent],
        min_nodes: int = 2,
        max_restarts: int = 0,
        join_timeout_s: float = 60,
        end_s: float = 0,
        is_elastic: bool = False,
    ) -> AgentGroup:
        waiting = [list(each) for each in agents]

        def start(number: int) -> Agent:
            return waiting[number].pop(0)

        def why_lost(number: int, status: int) -> str | None:
            return "no route" if status == LOST else None

        names = [f"node{number}" for number in range(len(agents))]
        limits = (min_nodes, max_restarts, join_timeout_s, end_s)
        return AgentGroup(names, start, why_lost, *limits, is_elastic, host=0)

    return make


@pytest.fixture
def clock(group: object, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock by one that only advances while the group sleeps, by 1 s between two looks at the agents."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    for name, value in {"time": clock, "POLL_S": 1.0, "FAILED_S": 30.0}.items():
        monkeypatch.setattr(agent_group, name, value)
    return now


def run(group: AgentGroup) -> dict[int, int]:
    return group.run(lambda: None)


def test_the_statuses_are_those_of_the_agents(group: Callable[..., AgentGroup]) -> None:
    assert run(group([Agent(0, after=3)], [Agent(0)])) == {1: 0, 0: 0}


def test_agents_that_wait_for_one_that_has_failed_are_stopped(group: Callable[..., AgentGroup]) -> None:
    assert run(group([Agent()], [Agent(1)])) == {0: 143, 1: 1}


def test_a_lost_machine_is_started_again(group: Callable[..., AgentGroup], capsys: pytest.CaptureFixture[str]) -> None:
    agents: list[Any] = [Agent(LOST, after=2), Agent(LOST), Agent(LOST), Agent(0, after=2)]
    made = group([Agent(0, after=9)], agents, max_restarts=1)
    assert run(made) == {0: 0, 1: 0} and made.lost == ""
    assert capsys.readouterr().err == "node1 is lost: no route\n"


def test_the_only_machine_is_started_again_once_its_ranks_have_ended(group: Callable[..., AgentGroup]) -> None:
    lost_at = time.monotonic()
    made = group([Agent(LOST), Agent(0)], min_nodes=1, max_restarts=1, end_s=0.3)
    assert run(made) == {0: 0} and time.monotonic() - lost_at > 0.3


def test_ranks_that_save_because_a_connection_is_lost_are_interrupted(group: Callable[..., AgentGroup]) -> None:
    made = group([Agent(143, after=3)], [Agent(LOST), Agent()], max_restarts=1, end_s=60)
    assert run(made) == {0: 143, 1: 143} and made.is_interrupted
    made = group([Agent(143, after=3)], [Agent(LOST)], min_nodes=1, max_restarts=1, end_s=60)
    assert run(made) == {0: 143} and made.is_interrupted
    made = group([Agent(143)], [Agent(143)], end_s=60)  # after a signal on the machines, for example
    assert run(made) == {0: 143, 1: 143} and not made.is_interrupted
    made = group([Agent()], [Agent(LOST), Agent(1)], max_restarts=1, end_s=60)  # saves because the other one has failed
    assert run(made) == {0: 143, 1: 1} and not made.is_interrupted
    made = group([Agent(143, after=3)], [Agent(LOST)], min_nodes=1, max_restarts=0, end_s=60)  # is not started again
    assert run(made) == {0: 143} and not made.is_interrupted and made.lost == "node1 is lost: no route"


@pytest.mark.parametrize(
    ("saved_s", "lost_s", "is_interrupted"), [(0, 5, True), (0, 20, False), (50, 0, True), (70, 0, False)]
)
def test_ranks_that_save_long_before_or_after_a_loss_are_not_interrupted(
    saved_s: int, lost_s: int, is_interrupted: bool, group: Callable[..., AgentGroup], clock: list[float]
) -> None:
    made = group([Agent(143, after=saved_s)], [Agent(LOST, after=lost_s), Agent()], max_restarts=1, end_s=60)
    assert run(made) == {0: 143, 1: 143} and made.is_interrupted == is_interrupted


def test_the_others_are_stopped_at_once_if_too_few_are_left(group: Callable[..., AgentGroup]) -> None:
    made = group([Agent()], [Agent(LOST)])
    assert run(made) == {0: 143} and made.lost == "node1 is lost: no route"
    made = group([Agent()], [Agent(LOST), *(Agent(LOST) for _ in range(10_000))], max_restarts=1, join_timeout_s=0.05)
    assert run(made) == {0: 143} and made.lost == "node1 is lost: no route"


def test_the_run_goes_on_without_a_machine_if_enough_are_left(group: Callable[..., AgentGroup]) -> None:
    made = group([Agent(0, after=5)], [Agent(LOST)], [Agent(0, after=5)])
    assert run(made) == {0: 0, 2: 0} and made.lost == ""


def test_the_others_of_an_elastic_run_continue_meanwhile_and_in_the_end(
    group: Callable[..., AgentGroup], clock: list[float]
) -> None:
    elastic = {"is_elastic": True, "max_restarts": 1, "end_s": 60}
    made = group([Agent(0, after=99)], [Agent(LOST), Agent(0, after=20)], **elastic)
    assert run(made) == {1: 0, 0: 0}, "the lost one was started again after 60 s"
    made = group([Agent(0, after=199)], [Agent(LOST), Agent(LOST, after=40)], **elastic)  # it is lost too often
    assert run(made) == {0: 0} and made.lost == ""
    made = group([Agent(0, after=199)], [Agent(LOST), Agent(2)], **elastic)  # the others have refused it
    assert run(made) == {1: 2, 0: 0} and made.lost == ""
    made = group([Agent(LOST)], [Agent()], is_elastic=True)  # the machine of the rendezvous
    assert run(made) == {1: 143} and made.lost == "node0 is lost: no route"


def test_a_machine_that_is_lost_once_the_run_is_finished_changes_nothing(group: Callable[..., AgentGroup]) -> None:
    made = group([Agent(0)], [Agent(LOST, after=3)], max_restarts=2)
    assert run(made) == {0: 0} and made.lost == ""
