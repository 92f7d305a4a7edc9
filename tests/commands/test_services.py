"""The commands of docs/clusters.md for services that repeat a command, with the variables that the services set."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from commands import Commands, free_port
from pages import Page

pytestmark = pytest.mark.thorough

SMALL = ("model=mlp", "max_steps=3", "threads=1", "logger=none", "backend=gloo")


def _sky_pilot(task: dict[str, object], words: str) -> tuple[str, list[dict[str, str]]]:
    port = free_port()
    nodes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    return f"{task['run']} launcher.master_port={port} {words}".replace("\n", " "), [
        {**nodes, "SKYPILOT_NODE_RANK": str(rank)} for rank in range(2)
    ]


def _kubeflow(job: dict[str, dict[str, dict[str, list[str]]]], words: str) -> tuple[str, list[dict[str, str]]]:
    port = str(free_port())
    nodes = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    return f"{shlex.join(job['spec']['trainer']['command'])} {words}", [
        {**nodes, "PET_NODE_RANK": str(rank)} for rank in range(2)
    ]


@pytest.mark.parametrize("service", [_sky_pilot, _kubeflow])
def test_the_command_of_a_service_starts_a_run_and_finds_it_finished(
    service: object, commands: Commands, tmp_path: Path
) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", Page("clusters.md").text, re.DOTALL)
    key = "num_nodes:" if service is _sky_pilot else "kind: TrainJob"
    description = yaml.safe_load(next(block for block in blocks if key in block))
    command, nodes = service(description, shlex.join(SMALL))  # type: ignore[operator]
    command = command.replace("/runs", str(tmp_path / "runs"))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for _ in range(2):
        both = [commands.start_as(["bash", "-ec", command], {**node, "PATH": path}) for node in nodes]
        done = [commands.finish(process) for process in both]
        assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    run = tmp_path / "runs" / "run" / "baseline"
    assert f"run_id=baseline is finished: {run}" in done[0].stdout
    result = json.loads((run / "result.json").read_text())
    assert (result["state"], result["world_size"], result["parallel"]) == ("finished", 2, "fsdp")
    assert len((run / "attempts.jsonl").read_text().splitlines()) == 1
