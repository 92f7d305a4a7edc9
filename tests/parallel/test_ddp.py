"""The messages of DistributedDataParallel other than gradients."""

from pathlib import Path

import pytest
from ranks import RankError
from torch.nn.parallel import DistributedDataParallel
from worlds import run

WORDS = ("model=convnet", "parallel=ddp", "batch_size=8", "max_steps=2", "logger=none")


def test_buffers_of_synchronized_batch_norm_are_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: DistributedDataParallel) -> None:
        raise AssertionError("sends its buffers")

    monkeypatch.setattr(DistributedDataParallel, "_sync_buffers", refuse)
    run(tmp_path, 2, *WORDS)
    with pytest.raises(RankError, match="sends its buffers"):
        run(tmp_path, 2, *WORDS, "sync_batchnorm=false")
