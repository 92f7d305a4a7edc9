"""README.md's own example of a user's model and data set, as printed there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The folder that README describes, in a directory outside the repository."""
    python = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    yaml = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    names = re.findall(r"`(mine/[\w/]+\.(?:py|yaml))`", README)
    files = dict(zip([n for n in names if n.endswith(".py")], python, strict=True))
    files |= dict(zip([n for n in names if n.endswith(".yaml")], yaml, strict=True))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path / "mine"


def runner(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runner", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_own_model_and_data_train_resume_and_are_checked(mine: Path) -> None:
    words = ("--config-dir", "mine", "model=wide", "data=ring")
    assert " ".join(("python -m runner", *words)) in README
    first = runner(mine.parent, *words, "epochs=2")
    assert first.returncode == 0, first.stderr
    assert "val/accuracy 0.9" in first.stdout
    # What was recorded is enough to go on, from another directory too.
    (path,) = (mine.parent / "outputs" / "run").iterdir()
    again = runner(mine, f"resume={path}", "epochs=3")
    assert again.returncode == 0, again.stderr
    assert "resuming after step 32" in again.stdout
    wrong = runner(mine.parent, *words, "model.width=wide")
    assert (wrong.returncode, wrong.stderr) == (2, "model.width=wide must be an integer (int); for example 512\n")


def test_every_option_is_in_the_table_of_groups() -> None:
    rows = README.partition("| group | options |\n|---|---|\n")[2].partition("\n\n")[0]
    table = dict(re.findall(r"^\| (`[\w`, ]+`) \| (.*) \|$", rows, re.MULTILINE))
    told = {group: set() for groups in table for group in re.findall(r"`(\w+)`", groups)}
    for groups, options in table.items():
        for group, words in zip(re.findall(r"`(\w+)`", groups), options.split(";"), strict=True):
            told[group] = set(re.findall(r"\w+", words))
    conf = Path(__file__).parents[2] / "conf"
    for group, options in told.items():
        assert {path.stem for path in (conf / group).glob("*.yaml")} - {"spawn_4"} == options, group
    assert {folder.name for folder in conf.iterdir() if folder.is_dir()} - {"experiment", "hydra"} == set(told)
