"""The options and environments that a launcher refuses."""

from typing import Any

import pytest
from worlds import configure

from runner.distributed.environment import RankInfo
from runner.errors import InputError
from runner.launchers.launch import launch
from runner.launchers.slurm.launcher import Slurm
from runner.launchers.spawn import Spawn
from runner.launchers.torchrun import Torchrun


@pytest.mark.parametrize("kind", [Spawn, Torchrun, Slurm])
def test_a_launcher_inside_a_world_is_refused(kind: type) -> None:
    name = kind.__name__.lower()
    _, request = configure("model=mlp", "parallel=ddp", f"launcher={name}")
    rank_info = RankInfo(1, 1, 2, 2, source="torchrun")
    with pytest.raises(InputError, match=f"launcher={name} starts processes itself, but torchrun has started this one"):
        launch(request, rank_info)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Spawn, {"nproc_per_node": 0}, "launcher.nproc_per_node=0 must be at least 1"),
        (Spawn, {"nodes": 2}, "launcher.nodes=2 needs launcher.master_addr"),
        (Spawn, {"nodes": 2, "node_rank": 2}, "launcher.node_rank=2 must be at least 0 and below"),
        (Spawn, {"master_addr": "a"}, "launcher.master_addr=a needs several nodes"),
        (Torchrun, {"nodes": "2:1"}, "launcher.nodes=2:1 must be a number of at least 1, or MIN:MAX"),
        (Torchrun, {"nodes": "1:2"}, "launcher.nodes=1:2 needs launcher.rdzv_endpoint=HOST:PORT"),
        (Torchrun, {"nodes": 2, "rdzv_endpoint": "a"}, "launcher.rdzv_endpoint=a must be HOST:PORT"),
        (Torchrun, {"rdzv_endpoint": "a:1"}, "launcher.rdzv_endpoint=a:1 needs several nodes"),
        (Torchrun, {"max_restarts": -1}, "launcher.max_restarts=-1 must be at least 0"),
        (Slurm, {"nodes": 0}, "launcher.nodes=0 must be at least 1"),
        (Slurm, {"gpus_per_node": 2, "nproc_per_node": 4}, "launcher.nproc_per_node=4 needs a GPU each"),
        (Slurm, {"sbatch": {"job_name": "x"}}, "launcher.sbatch.job_name: the launcher sets this option"),
        (Slurm, {"conda": "a", "venv": "b"}, "launcher.conda=a and launcher.venv=b exclude each other"),
    ],
)
def test_impossible_options_are_refused(kind: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        kind(**options)
    assert message in str(caught.value)
