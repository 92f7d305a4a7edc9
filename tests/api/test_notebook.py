"""Tests of docs/notebook.ipynb, run by Jupyter in a separate kernel, with its plots."""

import base64
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runner
from runner.paths import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
# Jupyter's button sends the signal to the kernel's process group, and thereby also to the ranks.
INTERRUPTED = """\
import os, pathlib, signal, threading, time

def press():
    while not list(pathlib.Path("outputs/stopped").glob("*/metrics.jsonl")):
        time.sleep(0.05)
    os.killpg(0, signal.SIGINT)

handler = signal.getsignal(signal.SIGINT)
threading.Thread(target=press, daemon=True).start()
try:
    runner.train(["model=mlp", "epochs=10000", "name=stopped", "launcher=spawn", "parallel=ddp"])
except runner.Preempted as error:
    print(runner.open_run(error.directory).state, signal.getsignal(signal.SIGINT) is handler)
"""


def test_committed_notebook_has_no_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.thorough
@pytest.mark.filterwarnings("default")  # from Jupyter's packages
def test_notebook_runs_in_jupyter_and_leaves_no_process(tmp_path: Path) -> None:
    """tests/support/leftovers.py reports the processes that the kernel leaves behind."""
    import nbformat
    from matplotlib.image import imread
    from nbclient import NotebookClient

    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(INTERRUPTED))
    own = {name: str(tmp_path / name) for name in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env = {**kept, **own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute(env=env)

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    images = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(images) == 2
    for image in images:
        pixels = imread(io.BytesIO(base64.b64decode(image)))  # (H, W, 4)
        assert min(pixels.shape[:2]) > 250 and len(np.unique(pixels[..., :3].reshape(-1, 3), axis=0)) > 100
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "model=mpl: no such model; did you mean mlp?" in printed and "\x1b" not in printed
    assert "finished: val/accuracy" in printed and "world    2 processes (spawn)" in printed
    assert printed.splitlines()[-1] == "preempted True"
    assert [run.state for run in runner.runs(tmp_path / "outputs")] == ["finished"] * 6 + ["preempted"]
