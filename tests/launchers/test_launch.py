"""Jobs that cannot run in the launcher's world are refused before any process, queued job or file exists."""

from collections.abc import Callable
from pathlib import Path

import pytest
from worlds import configure

from runner.distributed.environment import RankInfo
from runner.errors import InputError, Preempted
from runner.launchers.launch import launch
from runner.launchers.torchrun import Torchrun

Here = Callable[..., int]  # the fixture `here`
QUEUED = ("launcher=slurm", "launcher.nodes=2", "launcher.nproc_per_node=2")
# In a world of four ranks.
WRONG = {
    "parallel=none launcher.dry_run=true": "parallel=none is for one process, but the world has 4; try parallel=ddp",
    "parallel=ddp batch_size=3 micro_batches=4": "batch_size=3 must be at least micro_batches = 4",
    "parallel=pipeline parallel.stages=3": "parallel.stages=3 must divide the world of 4 ranks; try 2 or 4",
    "parallel=ddp optimizer.lr=-1": "optimizer.lr=-1",
}


@pytest.mark.parametrize("line", WRONG)
def test_an_impossible_job_is_not_queued(
    line: str, here: Here, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here(*line.split(), *QUEUED) == 2
    output = capfd.readouterr()
    assert output.err.startswith(WRONG[line]) and output.err.count("\n") == 1 and output.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_with_an_impossible_job_is_not_queued(
    here: Here, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here("-m", *QUEUED, "parallel=none,ddp", "batch_size=2,64") == 2
    assert capfd.readouterr().err.startswith("parallel=none is for one process, but the world has 4")
    assert list(tmp_path.iterdir()) == []


def test_no_process_is_started_for_an_impossible_job_unless_its_world_is_elastic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Torchrun, "launch", lambda *args: {"started": 1.0})
    with pytest.raises(InputError, match="parallel=none is for one process, but the world has 3"):
        launch(configure("launcher=spawn", "launcher.nproc_per_node=3")[1], RankInfo())
    elastic = ("launcher=torchrun", "launcher.nodes=1:2", "launcher.nproc_per_node=1", "launcher.rdzv_endpoint=a:1")
    assert launch(configure(*elastic)[1], RankInfo()) == {"started": 1.0}


@pytest.mark.parametrize(("raised", "status"), [(Preempted("SIGTERM"), 143), (TimeoutError(), 2)])
def test_wrong_input_is_reported_if_the_other_ranks_stop_or_do_not_appear(
    raised: Exception, status: int, here: Here, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def join(rank_info: RankInfo, backend: object) -> None:
        raise raised

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("runner.distributed.rendezvous.join", join)
    assert here("model=convnt") == status
    assert capfd.readouterr().err.startswith("model=convnt: " if status == 2 else "")
