"""docs/fine_tuning.md, as printed there: from a directory of weights to a LoRA run, and to directories of weights."""

import json
import os
import runpy
import warnings
from pathlib import Path

import pytest
from commands import Commands
from pages import Page, finish

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the import: tests use no network
pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("peft", reason="needs the extra lora")

PAGE = Page("fine_tuning.md")


@pytest.mark.thorough
def test_the_page_runs(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = PAGE.write(tmp_path)
    runpy.run_path(str(mine / "make_base.py"), run_name="__main__")
    lines = [line for line in PAGE.commands if " -m runner " in line]
    assert [line.partition(" -m runner ")[0] for line in lines] == ["torchrun --nproc-per-node 2", "python", "python"]
    for line in lines:
        done = finish(line, commands)
        assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "outputs/chat").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["val/loss"] for row in rows if "val/loss" in row]
    assert losses[-1] < losses[0] - 0.1, losses
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft calls what transformers deprecates
        runpy.run_path(str(mine / "generate.py"), run_name="__main__")
    of_tuned, of_adapted, are_equal = capsys.readouterr().out.splitlines()
    assert of_tuned == of_adapted and are_equal == "True"


@pytest.mark.thorough
def test_the_models_own_loss(tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare `OwnLoss` on two ranks with one, on batches with different numbers of labels."""
    monkeypatch.chdir(tmp_path)
    mine = PAGE.write(tmp_path)
    runpy.run_path(str(mine / "make_base.py"), run_name="__main__")
    (mine / "labeled.py").write_text(LABELED)
    (mine / "objective").mkdir()
    (mine / "objective/own.yaml").write_text("_target_: own_loss.OwnLoss\n")
    (mine / "data").mkdir()
    (mine / "data/labeled.yaml").write_text("_target_: labeled.Labeled\nsample_shape: [8]\nnum_outputs: 259\n")
    words = "--config-dir mine data=labeled objective=own model=hf model.config=mine/base init_from=mine/base"
    words += " batch_size=10 max_steps=3 precision=fp64 loader.shuffle=false"
    losses = []
    for start, name in (("python", "one"), ("torchrun --nproc-per-node 2", "two")):
        more = ["parallel=ddp"] if name == "two" else []
        done = finish(f"{start} -m runner {words} name={name}", commands, *more)
        assert done.returncode == 0, done.stderr
        (run,) = (tmp_path / "outputs" / name).iterdir()
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["train/loss"] for row in rows if "train/loss" in row])
    # Transformers computes its loss in float32.
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and len(losses[0]) == 3


LABELED = """
import torch


class Labeled(torch.utils.data.Dataset):
    def __init__(self, train: bool, sample_shape, num_outputs):
        self.tokens = torch.randint(3, 259, (30, 8), generator=torch.Generator().manual_seed(int(train)))

    def __len__(self):
        return 30

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(8) > 1 + index % 7, -100)}
"""
