"""On-policy data with a replay memory: two ranks produce the numbers of one process."""

from pathlib import Path

from parity import assert_equal
from worlds import run


def test_on_policy_data_has_the_same_numbers_on_two_ranks(tmp_path: Path) -> None:
    chosen = (f"--config-dir={Path(__file__).parent / 'on_policy'}", "experiment=on_policy", "optimizer=sgd")
    small = ("data.num_train=98", "data.num_val=9", "objective.size=64", "batch_size=13", "max_steps=12", "logger=none")
    one, two = (
        run(tmp_path / mode, ranks, *chosen, *small, f"parallel={mode}", "precision=fp64")
        for mode, ranks in (("none", 1), ("ddp", 2))
    )
    assert_equal(two, one)
    assert one.weights["objective.count"] == 98 + 4 * 13 and one.weights["objective.memory"].all()
