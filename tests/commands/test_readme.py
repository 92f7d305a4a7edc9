"""README.md: its example of a custom model and dataset, as printed, and its table of groups."""

import re
from pathlib import Path

import pytest
from commands import Commands

from runner.paths import ROOT

README = (ROOT / "README.md").read_text()


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The custom directory that README.md describes."""
    python = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    yaml = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    names = re.findall(r"`(mine/[\w/]+\.(?:py|yaml))`", README)
    files = dict(zip([n for n in names if n.endswith(".py")], python, strict=True))
    files |= dict(zip([n for n in names if n.endswith(".yaml")], yaml, strict=True))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path / "mine"


def test_custom_model_and_data_train_resume_and_are_checked(mine: Path, commands: Commands) -> None:
    arguments = ("--config-dir", "mine", "model=wide", "data=ring")
    assert " ".join(("python -m runner", *arguments)) in README
    first = commands.forked(*arguments, "epochs=2")
    assert first.returncode == 0, first.stderr
    assert "val/accuracy 0.9" in first.stdout
    (path,) = (mine.parent / "outputs" / "run").iterdir()
    resumed = Commands(mine).forked(f"resume={path}", "epochs=3")  # from another working directory
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step 32" in resumed.stdout
    wrong = commands.forked(*arguments, "model.width=wide")
    assert (wrong.returncode, wrong.stderr) == (2, "model.width=wide must be int; for example 512\n")


def test_table_of_groups_lists_every_option() -> None:
    rows = README.partition("| group | options |\n|---|---|\n")[2].partition("\n\n")[0]
    listed: dict[str, set[str]] = {}
    for groups, options in re.findall(r"^\| (`[\w`, ]+`) \| (.*) \|$", rows, re.MULTILINE):
        for group, names in zip(re.findall(r"`(\w+)`", groups), options.split(";"), strict=True):
            listed[group] = set(re.findall(r"\w+", names))
    conf = ROOT / "conf"
    for group, options in listed.items():
        assert {path.stem for path in (conf / group).glob("*.yaml")} - {"spawn_4"} == options, group
    assert {path.name for path in conf.iterdir() if path.is_dir()} - {"device", "experiment", "hydra"} == set(listed)
