"""The rank that reports a failure if the reporting rank dies."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from runner.distributed.environment import RankInfo
from runner.distributed.failures.shutdown import Shutdown


@pytest.mark.parametrize("has_recorded", [True, False])
def test_report_is_not_repeated_if_rank_0_made_it_before_it_died(has_recorded: bool) -> None:
    """It records the outcome and exits just after this rank has checked for it, or exits without recording it."""
    recorded = False

    def exited() -> list[int]:
        nonlocal recorded
        recorded = has_recorded
        return [0]

    neighbours = SimpleNamespace(exited=exited, lowest_running=lambda excluding: 1)
    shutdown = Shutdown(
        RankInfo(1, 1, 2, 2), cast(Any, SimpleNamespace(job=None)), cast(Any, neighbours), cast(Any, None)
    )
    shutdown.is_recorded = lambda: recorded
    assert shutdown.takes_over_report() == (not has_recorded)
