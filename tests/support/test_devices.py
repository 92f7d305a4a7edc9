"""The option --device: pytest counts an imitated GPU, which the jobs then miss."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

IMITATED = "import torch\ntorch.cuda.device_count = lambda: 1\n"
TESTS = """
import os, pytest
from ranks import RankError
from worlds import run

parent = os.getpid()
refused = pytest.raises(RankError, match="Found no NVIDIA driver|not compiled with CUDA")

def train(folder, *words):
    return run(folder, 2, *words)

@pytest.fixture
def trained(tmp_path):
    with refused:
        train(tmp_path, "parallel=fsdp", "backend=gloo")

def test_job(tmp_path):
    assert os.getppid() == parent
    with refused:
        run(tmp_path, 1)

def test_of_a_fixture(trained):
    pass

def test_stages(tmp_path):
    train(tmp_path, "parallel=pipeline")

def test_two_gpus(tmp_path):
    run(tmp_path, 1, "backend.devices_per_rank=2")

@pytest.mark.cpu("counts cores")
def test_cores(tmp_path):
    train(tmp_path)

def test_dies(tmp_path):
    os._exit(7)
    train(tmp_path)

def test_without_a_job():
    pass

@pytest.mark.gpu
def test_of_gpus():
    assert os.getppid() == parent
"""


def pytest_in(folder: Path, *args: str) -> str:
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "tests" / "test_inner.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n")
    command = [sys.executable, "-m", "pytest", "-p", "devices", "-q", "--no-header", "-rA", "-n", "0", *args]
    paths = os.pathsep.join(map(str, (Path(__file__).parent, Path(__file__).parents[2])))
    environment = os.environ | {"PYTHONPATH": paths, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tests_of_jobs_run_on_the_gpu_and_those_that_cannot_say_why(tmp_path: Path) -> None:
    assert "ERROR: --device cuda needs a GPU, and torch finds none here" in pytest_in(tmp_path, "--device=cuda")
    (tmp_path / "conftest.py").write_text(IMITATED)
    output = pytest_in(tmp_path, "--device=cuda")
    outcomes = dict(
        reversed(pair) for pair in re.findall(r"^(PASSED|FAILED) tests/test_inner.py::(\w+)", output, re.MULTILINE)
    )
    assert outcomes == {
        "test_job": "PASSED", "test_of_a_fixture": "PASSED", "test_of_gpus": "PASSED", "test_dies": "FAILED"
    }, output  # fmt: skip
    assert "the process of the test ended with status 7" in output
    for reason in ("is about CPUs: counts cores", "needs 2 GPUs", "gloo does not send tensors of a GPU"):
        assert output.count(reason) == 1, output
    assert "1 failed, 3 passed, 3 skipped, 1 deselected" in output
