"""A run of the version whose samples had another order goes on with that, and is made again with it.

`older_run` is one that it made: 12 steps, in float64, of which the checkpoint after step 9 is left, one step into the
second epoch.
"""

import json
import shutil
from pathlib import Path

import pytest
from worlds import Run, run

from runner.runs.train_state import OLDER_ORDER, ORDER, available, read_train_state

STORED = Run(Path(__file__).parent / "older_run")


@pytest.fixture
def older(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED.path, tmp_path / "outputs" / "older" / "one"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_begun_run_goes_on_with_its_order(older: Path, world_size: int, tmp_path: Path) -> None:
    words = ("parallel=ddp",) if world_size > 1 else ()
    resumed = run(tmp_path, world_size, f"resume={older}", "max_steps=10", *words)
    assert "in the order of the older version that the run was begun with" in (older / "log.txt").read_text()
    assert read_train_state(available(older / "checkpoints")[-1]).order == resumed.result["order"] == OLDER_ORDER
    run(tmp_path, world_size, f"resume={older}", "max_steps=12", *words)  # from what was saved with the newer code
    assert resumed.losses == pytest.approx(STORED.losses, rel=1e-9) and len(resumed.losses) == 12
    assert resumed.result["metrics"] == pytest.approx(STORED.result["metrics"], rel=1e-9)


def test_it_is_made_again_in_its_order_and_a_new_run_has_another(older: Path, tmp_path: Path) -> None:
    again = run(tmp_path / "again", 1, "task=rerun", f"run={older}", f"outputs={tmp_path / 'again'}")
    assert again.losses == pytest.approx(STORED.losses, rel=1e-9) and again.result["order"] == OLDER_ORDER
    recorded = [word for word in STORED.result["command"] if "=" in word]
    new = run(tmp_path / "new", 1, *recorded, f"outputs={tmp_path / 'new'}")
    assert new.result["order"] == ORDER and read_train_state(available(new.path / "checkpoints")[-1]).order == ORDER
    assert max(abs(loss - STORED.losses[step]) for step, loss in new.losses.items()) > 1e-3


def test_an_order_that_is_not_known_is_refused(older: Path, tmp_path: Path) -> None:
    result = older / "result.json"
    result.write_text(json.dumps({**STORED.result, "order": 3}))
    with pytest.raises(Exception, match="in order=3, which this version does not know"):
        run(tmp_path / "again", 1, "task=rerun", f"run={older}", f"outputs={tmp_path / 'again'}")
    progress = older / "checkpoints" / "step_9" / "progress.json"
    progress.write_text(json.dumps({**json.loads(progress.read_text()), "order": 3}))
    with pytest.raises(ValueError, match=r"progress.json has order=3, which this version does not know"):
        read_train_state(progress.parent)
