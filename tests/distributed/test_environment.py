"""Ranks described by the variables of torchrun, of srun and of users, and invalid ones."""

import pytest

from runner.distributed.environment import RankInfo, address_of, find_rank_info, first_host, step_port, tasks_per_node
from runner.errors import InputError

BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
TORCHRUN = {
    **BY_HAND,
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
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


def test_no_variables_mean_a_world_of_one() -> None:
    assert find_rank_info(environ={}) == RankInfo()
    assert find_rank_info(environ={"MASTER_ADDR": "left-over", "MASTER_PORT": "1"}).world_size == 1


def test_variables_set_by_hand_mean_one_machine() -> None:
    rank_info = find_rank_info(environ=BY_HAND)
    assert (rank_info.rank, rank_info.local_rank, rank_info.world_size, rank_info.local_world_size) == (1, 1, 4, 4)
    assert not rank_info.hosts_store
    assert find_rank_info(environ={**BY_HAND, "RANK": "0"}).hosts_store


def test_torchrun_agent_serves_the_store() -> None:
    rank_info = find_rank_info(environ={**TORCHRUN, "RANK": "0"})
    assert (rank_info.source, rank_info.local_rank, rank_info.local_world_size, rank_info.restart) == (
        "torchrun",
        0,
        2,
        2,
    )
    assert not rank_info.hosts_store and rank_info.restart_file is None
    error_file = {"TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_x/none_y/attempt_1/0/error.json"}
    assert find_rank_info(environ={**TORCHRUN, **error_file}).restart_file == "/tmp/torchelastic_x/none_y/restart"


def test_other_rendezvous_needs_no_master() -> None:
    rank_info = find_rank_info("file:///tmp/meeting", {"RANK": "1", "WORLD_SIZE": "2"})
    assert (rank_info.rank, rank_info.world_size) == (1, 2)
    with pytest.raises(InputError, match="RANK=1: incomplete world; WORLD_SIZE must be set too"):
        find_rank_info("file:///tmp/meeting", {"RANK": "1"})


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"RANK": ""}, r"incomplete world; RANK must be set too"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, r"MASTER_ADDR and MASTER_PORT must be set too"),
        ({"RANK": "4"}, r"RANK=4 must be at least 0 and below WORLD_SIZE=4"),
        ({"WORLD_SIZE": "four"}, r"WORLD_SIZE=four must be an integer"),
    ],
)
def test_invalid_variables_are_refused(change: dict[str, str], output: str) -> None:
    with pytest.raises(InputError, match=output):
        find_rank_info(environ={**BY_HAND, **change})


def test_step_task_is_a_rank() -> None:
    rank_info = find_rank_info(environ=STEP)
    assert (rank_info.rank, rank_info.local_rank, rank_info.world_size, rank_info.local_world_size) == (3, 1, 4, 2)
    assert (rank_info.source, rank_info.master_addr, rank_info.on_one_machine) == ("srun", "localhost", False)
    assert not rank_info.hosts_store
    assert find_rank_info(environ={**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).hosts_store


def test_batch_script_is_a_world_of_one() -> None:
    """In a batch script SLURM_PROCID and SLURM_NTASKS are set, but there is no step."""
    batch = {"SLURM_JOB_ID": "41", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert find_rank_info(environ=batch) == RankInfo()


def test_single_task_may_start_processes() -> None:
    assert find_rank_info(environ={**STEP, "SLURM_STEP_NUM_TASKS": "1"}) == RankInfo(source="one process under srun")


def test_torchrun_variables_take_precedence() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    rank_info = find_rank_info(environ={**STEP, **torchrun})
    assert (rank_info.source, rank_info.world_size) == ("torchrun", 2)


def test_exported_address_and_port_take_precedence() -> None:
    rank_info = find_rank_info(environ={**STEP, "MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (rank_info.master_addr, rank_info.master_port) == ("head", 1234)


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"])
def test_incomplete_step_is_refused(missing: str) -> None:
    environ = {key: value for key, value in STEP.items() if key != missing}
    with pytest.raises(InputError, match=f"incomplete job step; {missing} must be set too"):
        find_rank_info(environ=environ)


def test_steps_on_one_node_use_different_ports() -> None:
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


def test_unresolvable_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match=r"first node is no-such-node\.invalid, whose name does not resolve"):
        address_of("no-such-node.invalid")
