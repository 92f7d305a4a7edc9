"""Which rank tells a failure, at moments between which another one may have told it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from runner.distributed.ending import Ending
from runner.distributed.environment import RankInfo


@pytest.mark.parametrize("has_recorded", [True, False])
def test_what_rank_0_has_told_before_it_has_gone_is_not_told_again(has_recorded: bool) -> None:
    """It records the end and goes just after this rank has looked for a record, or goes without a word."""
    recorded = False

    def gone() -> list[int]:
        nonlocal recorded
        recorded = has_recorded
        return [0]

    neighbours = SimpleNamespace(gone=gone, lowest_here=lambda but: 1)
    ending = Ending(RankInfo(1, 1, 2, 2), cast(Any, SimpleNamespace(job=None)), cast(Any, neighbours), cast(Any, None))
    ending.is_recorded = lambda: recorded
    assert ending.stands_in() == (not has_recorded)
