"""What srun's variables say of a task, and what is refused of them."""

import pytest

from runner.distributed.environment import RankInfo, address_of, find_rank_info, first_host, step_port, tasks_per_node
from runner.errors import InputError

STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "localhost,n[2-3]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_a_task_of_a_step_is_a_rank() -> None:
    rank_info = find_rank_info(environ=STEP)
    assert (rank_info.rank, rank_info.local_rank, rank_info.world_size, rank_info.local_world_size) == (3, 1, 4, 2)
    assert (rank_info.found, rank_info.master_addr, rank_info.on_one_machine) == ("srun", "localhost", False)
    assert not rank_info.hosts_store
    assert find_rank_info(environ={**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).hosts_store


def test_a_job_without_a_step_is_a_world_of_one() -> None:
    """In a batch script SLURM_PROCID and SLURM_NTASKS are set, but there is no step."""
    batch = {"SLURM_JOB_ID": "41", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert find_rank_info(environ=batch) == RankInfo()


def test_a_single_task_may_start_processes_itself() -> None:
    assert find_rank_info(environ={**STEP, "SLURM_STEP_NUM_TASKS": "1"}) == RankInfo(found="one process under srun")


def test_torchruns_variables_win() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    rank_info = find_rank_info(environ={**STEP, **torchrun})
    assert (rank_info.found, rank_info.world_size) == ("torchrun", 2)


def test_an_address_and_a_port_of_the_script_win() -> None:
    rank_info = find_rank_info(environ={**STEP, "MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (rank_info.master_addr, rank_info.master_port) == ("head", 1234)


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"])
def test_half_a_step_is_refused(missing: str) -> None:
    environ = {key: value for key, value in STEP.items() if key != missing}
    with pytest.raises(InputError, match=f"half a job step; {missing} must be set too"):
        find_rank_info(environ=environ)


def test_steps_of_one_node_do_not_share_a_port() -> None:
    steps = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(40, 90) for step in range(20)]
    ports = [step_port(environ) for environ in steps]
    assert len(set(ports)) == len(ports) and 1024 < min(ports) <= max(ports) < 32_768
    assert step_port({**STEP, "SLURM_STEP_RESV_PORTS": "12000-12003"}) == 12_000


@pytest.mark.parametrize(("short", "counts"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2])])
def test_tasks_per_node(short: str, counts: list[int]) -> None:
    assert tasks_per_node(short) == counts


@pytest.mark.parametrize(
    ("short", "first"),
    [("n1", "n1"), ("n[1-2]", "n1"), ("gpu[03-08,11],login", "gpu03"), ("rack[2-3]n[01,04]", "rack2n01"), ("a,b", "a")],
)
def test_first_host(short: str, first: str) -> None:
    assert first_host(short) == first


def test_a_name_that_nothing_knows_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match=r"first node is no-such-node\.invalid, whose name does not resolve"):
        address_of("no-such-node.invalid")
