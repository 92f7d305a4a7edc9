"""parallel=ddp beyond the parity matrix: messages other than gradients, and small batches."""

from pathlib import Path

import pytest
from parity import COMMON, assert_equal
from ranks import RankError
from torch.nn.parallel import DistributedDataParallel
from worlds import run

CONVNET = ("model=convnet", "parallel=ddp", "batch_size=8", "max_steps=2", "logger=none")


def test_buffers_of_synchronized_batch_norm_are_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: DistributedDataParallel) -> None:
        raise AssertionError("sends its buffers")

    monkeypatch.setattr(DistributedDataParallel, "_sync_buffers", refuse)
    run(tmp_path, 2, *CONVNET)
    with pytest.raises(RankError, match="sends its buffers"):
        run(tmp_path, 2, *CONVNET, "sync_batchnorm=false")


def test_a_batch_may_have_fewer_samples_than_there_are_ranks(tmp_path: Path) -> None:
    words = ("model=mlp", "model.hidden=[8]", "model.batch_norm=true", "data=toy", "data.num_train=8", "batch_size=2")
    one, three = (run(tmp_path / str(n), n, *words, *COMMON, f"parallel={m}") for n, m in ((1, "none"), (3, "ddp")))
    assert_equal(three, one)
