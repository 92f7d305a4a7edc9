"""task=train: the place in the data at which a resumed run continues."""

import pytest

from runner.checkpoints.layout import TrainState
from runner.tasks.train import _in_epochs_of


@pytest.mark.parametrize(
    ("batch_size", "steps_per_epoch", "epoch", "step_in_epoch"),
    [
        pytest.param(4, 8, 2, 3, id="the same batch size"),
        pytest.param(2, 16, 2, 6, id="a smaller one"),
        pytest.param(5, 7, 2, 2, id="a larger one, in the middle of a batch"),
        pytest.param(12, 1, 3, 0, id="one whose only step has been read"),
        pytest.param(4, 2, 3, 0, id="less data"),
    ],
)
def test_a_resumed_run_continues_at_the_first_unread_samples(
    batch_size: int, steps_per_epoch: int, epoch: int, step_in_epoch: int
) -> None:
    state = TrainState(step=19, epoch=2, step_in_epoch=3, batch_size=4)  # 12 samples of the epoch have been read
    resumed = _in_epochs_of(state, batch_size, steps_per_epoch, resume_force=True)
    assert resumed == TrainState(step=19, epoch=epoch, step_in_epoch=step_in_epoch, batch_size=batch_size)
