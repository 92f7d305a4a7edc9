"""What is kept of the code when a job is submitted, and what is said where it is another by then."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import runner
from runner.errors import InputError
from runner.runs import code_state, frozen_code
from runner.runs.code_state import facts_of_job, told, where_it_was
from runner.runs.frozen_code import freeze, remember, take_state
from runner.runs.provenance import git_diff, git_state


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which is also the folder of --config-dir."""
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "model/own.yaml": "_target_: own.Own\n",
        "own.py": "SCALE = 1\n",
        "words.txt": "of the model\n",
        ".git/config": "",
        "__pycache__/own.pyc": "",
        "outputs/run/earlier/overrides.yaml": "",
        "outputs/run/earlier/code/old.py": "",
        "environment/pyvenv.cfg": "",
        "environment/lib/other.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "weights.bin").write_bytes(bytes(frozen_code.LARGE + 1))
    return tmp_path


def run_directory(folder: Path, name: str) -> Path:
    (folder / "outputs" / "run" / name).mkdir(parents=True)
    return folder / "outputs" / "run" / name


def sums_hold(folder: Path) -> bool:
    """As the job's script asks."""
    words = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    return subprocess.run(words, cwd=folder, capture_output=True, timeout=60).returncode == 0


def test_what_is_kept_is_the_runner_and_the_users_own_code(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mine / "library").mkdir()
    (mine / "library" / "layers.py").write_text("")
    other = mine.parent / f"{mine.name}-path"  # as of PYTHONPATH
    (other / "models").mkdir(parents=True)
    (other / "models" / "of_mine.py").write_text("")
    (other / "beside.py").write_text("")
    (other / "site-packages").mkdir()
    (other / "site-packages" / "bought.py").write_text("")
    for folder in (other, other / "site-packages", mine):
        monkeypatch.syspath_prepend(folder)
    for name in ("library.layers", "models.of_mine", "beside", "bought"):
        importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))  # and gone after the test

    frozen = freeze(run_directory(mine, "one"), [str(mine)])
    code = frozen.folder
    assert (frozen.changed, frozen.config_dirs) == ([], [str(code / "own" / f"0-{mine.name}")])
    own = {path.relative_to(frozen.config_dirs[0]).as_posix() for path in Path(frozen.config_dirs[0]).rglob("*")}
    assert own == {"model", "model/own.yaml", "own.py", "words.txt", "weights.bin", "library", "library/layers.py"}
    assert (code / "own" / f"0-{mine.name}" / "weights.bin").readlink() == mine / "weights.bin"
    imported = {path.relative_to(code / "imported").as_posix() for path in (code / "imported").rglob("*.py")}
    assert {"beside.py", "models/of_mine.py"} <= imported and not {"bought.py", "library/layers.py"} & imported
    for name in ("runner/main.py", "conf/config.yaml", "models/mlp.py", "hydra_plugins/runner/grid_sweeper.py"):
        assert (code / "installed" / name).read_bytes() == (runner.ROOT / name).read_bytes()
    assert sums_hold(code)


def test_what_was_kept_stays_and_what_differs_by_now_is_named(mine: Path) -> None:
    directory = run_directory(mine, "one")
    first = freeze(directory, [str(mine)])
    (mine / "own.py").write_text("SCALE = 2\n")
    (mine / "model" / "new.yaml").write_text("")
    again = freeze(directory, [str(mine)])
    assert again.changed == ["model/new.yaml", "own.py"] and again.config_dirs == first.config_dirs
    assert Path(again.config_dirs[0], "own.py").read_text() == "SCALE = 1\n"
    # A folder that is typed on top comes to it.
    second = mine.parent / f"{mine.name}-second"
    (second / "data").mkdir(parents=True)
    (second / "data" / "ring.yaml").write_text("")
    folders = freeze(directory, [str(mine), str(second)]).config_dirs
    assert folders[0] == first.config_dirs[0] and Path(folders[1], "data", "ring.yaml").exists()
    assert freeze(directory, [*folders]).config_dirs == folders and sums_hold(again.folder)


@pytest.mark.fault("the kept code of a job changed", outcome="refused")
def test_what_is_damaged_is_refused(mine: Path) -> None:
    directory = run_directory(mine, "one")
    frozen = freeze(directory, [str(mine)])
    (frozen.folder / "installed" / "runner" / "main.py").write_text("")
    assert not sums_hold(frozen.folder)
    with pytest.raises(InputError, match=r"installed/runner/main.py is not what was kept .*; restore it, or remove "):
        freeze(directory, [str(mine)])
    (frozen.folder / "code.json").unlink()
    with pytest.raises(InputError, match=r"code/code.json is not what was kept"):
        freeze(directory, [str(mine)])


def test_data_in_the_folder_is_refused_before_it_is_copied(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run_directory(mine, "one")
    monkeypatch.setattr(frozen_code, "MAX_FILES", 2)
    for write in (True, False):
        with pytest.raises(InputError, match=r"has 3 small files of 0 MiB, more than 2 or 100 MiB; move the data out"):
            freeze(directory, [str(mine)], write)
    assert list(directory.iterdir()) == []


def test_the_jobs_of_a_sweep_share_it(mine: Path) -> None:
    sweep = run_directory(mine, "sweep-1")
    (sweep / "ledger.jsonl").write_text("")
    (sweep / "0-a").mkdir()
    assert freeze(sweep, []).folder == freeze(sweep / "0-a", []).folder == sweep / "code"
    assert freeze(run_directory(mine, "alone"), [], write=False).folder.parent.name == "alone"
    assert list((mine / "outputs" / "run" / "alone").iterdir()) == []


def test_a_live_job_says_what_is_other_than_when_it_was_submitted(mine: Path) -> None:
    directory = run_directory(mine, "one")
    path = remember(directory, take_state([str(mine)]))
    state = code_state.read_state(path)
    assert told(facts_of_job(state) or {}) is None
    (mine / "own.py").unlink()
    facts = facts_of_job(state)
    assert facts is not None and (facts["code"], facts["changed"]) == ("live", ["own.py"])
    assert told(facts) == f"the code is another than when this was submitted, {state.at}: own.py"
    (mine / "late.py").write_text("")
    (mine / "words.txt").write_text("which are no code")
    assert state.changed() == ["late.py", "own.py"]
    assert facts_of_job(None) is None


def test_a_job_that_runs_a_copy_records_where_it_is_from(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = freeze(run_directory(mine, "one"), [str(mine)])
    then = git_state()
    monkeypatch.setattr(runner, "ROOT", frozen.folder / "installed")
    assert where_it_was(frozen.config_dirs[0]) == str(mine) and where_it_was("/elsewhere") == "/elsewhere"
    facts = facts_of_job(None)
    assert facts is not None and facts["code"] == "frozen" and str(told(facts)).endswith(f"kept in {frozen.folder}")
    facts = json.loads((frozen.folder / "code.json").read_text())
    assert git_state() == then == facts["git"]
    (frozen.folder / "git.diff").write_text("of then")
    assert git_diff() == "of then"
