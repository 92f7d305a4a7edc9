"""Tests of other users' directories: they are only read as data unless they are trusted."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import runner
from runner.config.resume import add_recorded
from runner.errors import InputError
from runner.records.frozen_code import freeze_code

SMALL = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "logger=none", "threads=1", "max_steps=2")
OTHER_UID = 54321  # a uid that no user has


@pytest.fixture
def run(tmp_path: Path, here: Callable[..., int]) -> Path:
    assert here(*SMALL) == 0
    return next((tmp_path / "outputs" / "run").iterdir())


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that changes the owner of paths in the result of os.stat."""
    given: list[Path] = []
    stat = os.stat

    def stat_with_other_owner(path: object, **options: object) -> os.stat_result:
        found = stat(path, **options)  # type: ignore[arg-type]
        return os.stat_result((*found[:4], OTHER_UID, *found[5:])) if Path(str(path)) in given else found

    monkeypatch.setattr("runner.config.trust.os.stat", stat_with_other_owner)
    return lambda *paths: given.extend(paths)


def trap(tmp_path: Path) -> Path:
    """Return a custom directory whose module writes a sentinel file when it is imported."""
    folder = tmp_path / "evil"
    (folder / "model").mkdir(parents=True)
    name = f"trap_{tmp_path.name}"  # a new name, because a module stays imported
    touch = f"from pathlib import Path\nPath({str(tmp_path / 'sentinel')!r}).touch()\n"
    (folder / f"{name}.py").write_text(f"{touch}from runner.shipped.models.mlp import MLP as Trap\n")
    arguments = "sample_shape: ${data.sample_shape}\nnum_outputs: ${data.num_outputs}\nhidden: [16]\n"
    text = f"_target_: {name}.Trap\n{arguments}"
    (folder / "model" / "mlp.yaml").write_text(text)
    return folder


@pytest.mark.fault("a malicious run directory", outcome="refused")
@pytest.mark.parametrize("whose", [".", "overrides.yaml"])
def test_code_of_another_user_is_not_imported(
    whose: str,
    run: Path,
    give_away: Callable[..., None],
    here: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorded = yaml.safe_load((run / "overrides.yaml").read_text())
    folder = trap(tmp_path)
    (run / "overrides.yaml").write_text(yaml.safe_dump([f"--config-dir={folder}", *recorded]))
    give_away(run / whose)
    commands = [
        (f"resume={run}", "max_steps=3"),
        ("resume=last", "max_steps=3"),
        (f"fork={run}", "max_steps=3"),
        ("task=evaluate", f"run={run}"),
        ("task=predict", f"run={run}"),
        ("task=export", f"run={run}"),
        ("task=rerun", f"run={run}"),
        ("-m", "task=evaluate", f"run={run}", "seed=0,1"),
        ("task=evaluate", f"run={run}", "--cfg", "job"),
    ]
    for args in commands:
        capsys.readouterr()
        assert here(*args) == 2, args
        reported = capsys.readouterr().err
        assert len(reported.splitlines()) == 1 and "=" in reported.partition(" ")[0], reported
        assert f"belongs to uid 54321 and would run --config-dir={folder}" in reported
    with pytest.raises(InputError, match="would run --config-dir="):
        runner.open_run(run).model()
    assert not (tmp_path / "sentinel").exists()
    assert here("task=evaluate", f"run={run}", "trust=true") == 0
    assert (tmp_path / "sentinel").exists()
    runner.open_run(run, trust=True).model()


@pytest.mark.fault("a malicious run directory", outcome="refused")
@pytest.mark.parametrize("whose", [".", "overrides.yaml", "config.yaml", "result.json", "code/0123456789ab/net.py"])
def test_a_run_with_files_of_another_user_is_only_read_as_data(
    whose: str, run: Path, give_away: Callable[..., None], here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a run without custom code, because its options could name a command, a file or a host."""
    own = shutil.copytree(run, run.with_name("own"), symlinks=True)
    (run / whose).parent.mkdir(parents=True, exist_ok=True)
    (run / whose).touch()
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["callbacks"] = {"one": {"_target_": "os.system"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    give_away(run / whose)
    assert here("task=evaluate", f"run={run}") == 2
    reported = capsys.readouterr().err
    assert "belongs to uid 54321 and would run " in reported and "_target_: os.system" in reported
    with pytest.raises(InputError, match="belongs to uid 54321"):
        runner.open_run(run).model()
    assert here("task=report", f"run={run}") == here("task=diff", f"run={run}", f"diff.with={own}") == 0
    assert runner.open_run(run).state == "finished" and run in [Path(each) for each in runner.runs(run.parent)]


def test_the_refusal_of_a_run_without_custom_code(run: Path, give_away: Callable[..., None]) -> None:
    give_away(run)
    rule = (
        "would run no custom code, but with the options of its record; review that, and if you trust it, add trust=true"
    )
    with pytest.raises(InputError, match=rule):
        add_recorded(["task=evaluate", f"run={run}"], [], multirun=False)
    assert "model=mlp" in add_recorded(["task=evaluate", f"run={run}", "trust=true"], [], multirun=False).overrides


@pytest.mark.fault("a malicious run directory", outcome="refused")
@pytest.mark.parametrize("trust", ["trust=true", "trust=false"])
def test_no_record_chooses_where_results_are_written(
    trust: str, run: Path, give_away: Callable[..., None], here: Callable[..., int], tmp_path: Path
) -> None:
    """Neither the record of another user, which must be trusted, nor the user's own."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("predictions.csv", "model.safetensors"):
        (mine / name).write_text("mine")
    before = {path: path.read_text() for path in mine.iterdir()}
    locations = [f"predict.output={mine}/predictions.csv", f"export.output={mine}/model.safetensors"]
    locations += [f"report.output={mine}", f"outputs={mine}", "name=theirs"]
    (run / "overrides.yaml").write_text(yaml.safe_dump([*SMALL, *locations]))
    if trust == "trust=true":
        give_away(run)
    for task in ("predict", "export", "evaluate", "rerun"):
        assert here(f"task={task}", f"run={run}", trust) == 0
    assert here(f"fork={run}", "max_steps=3", trust) == 0
    assert {path: path.read_text() for path in mine.iterdir()} == before
    assert {path.name for path in (tmp_path / "outputs").iterdir()} == {"run"}


@pytest.mark.fault("a malicious run directory", outcome="refused")
def test_code_in_a_directory_of_another_user_is_not_submitted(
    run: Path,
    give_away: Callable[..., None],
    here: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text(f"#!/bin/sh\ncat $2 > {tmp_path}/submitted\necho 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    copy = freeze_code(run, []).path
    give_away(copy / "installed" / "runner" / "cli.py")
    assert here(f"resume={run}", "max_steps=3", "launcher=slurm") == 2
    assert f"belongs to uid 54321 and would run {copy}" in capsys.readouterr().err
    assert not (tmp_path / "submitted").exists()
    assert here(f"resume={run}", "max_steps=3", "launcher=slurm", "parallel=ddp", "trust=true") == 0
    assert copy.name in (tmp_path / "submitted").read_text()


@pytest.mark.thorough
@pytest.mark.fault("a malicious run directory", outcome="refused")
def test_a_sweep_of_another_user_is_only_read_as_data(
    give_away: Callable[..., None], here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("-m", *SMALL, "seed=0,1") == 0
    (sweep,) = (tmp_path / "outputs" / "run").iterdir()
    ledger = sweep / "ledger.jsonl"
    first, *others = ledger.read_text().splitlines()
    record = json.loads(first)
    record["sweep"]["config_dirs"] = [str(trap(tmp_path))]
    ledger.write_text("\n".join([json.dumps(record), *others]) + "\n")
    give_away(ledger)
    assert here("-m", "resume=last", "seed=2") == 2
    assert "resume=last belongs to uid 54321 and would run --config-dir=" in capsys.readouterr().err
    assert here("task=report", "run=last") == 0  # reads it as data
    assert not (tmp_path / "sentinel").exists()
    ledger.write_text("\n".join([first, *others]) + "\n")
    assert here("-m", "resume=last", "seed=2") == 2
    assert "would run no custom code" in capsys.readouterr().err
    assert here("-m", "resume=last", "seed=2", "trust=true") == 0


@pytest.mark.fault("a record file with unexpected content", outcome="refused")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("overrides.yaml", "- model=mlp\n- {"),
        ("config.yaml", "early_stop: 3"),
        ("result.json", '{"state": '),
        ("metrics.jsonl", '{"step": null}\n'),
        ("loggers.json", "3"),
    ],
)
def test_damaged_file_is_named(
    name: str, text: str, run: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).write_text(text)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert here(f"resume={run}", "max_steps=3") == 2
    reported = capsys.readouterr().err
    assert name in reported and len(reported.splitlines()) == 1, reported
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    if name in ("overrides.yaml", "result.json", "metrics.jsonl"):
        assert here("task=report", f"run={run}") == 2
        reported = "".join(capsys.readouterr())
        assert name in reported, reported


@pytest.mark.fault("a record file with unexpected content", outcome="refused")
@pytest.mark.parametrize("line", ['{"number": 7, "label": "../../elsewhere", "overrides": []}', '{"sweep": []}'])
def test_damaged_ledger_is_named(
    line: str, here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "outputs" / "run" / "sweep-20261122-000000"
    sweep.mkdir(parents=True)
    first = {"sweep": {"typed": ["seed=0"], "config_dirs": [], "command": [], "shared": {}}}
    (sweep / "ledger.jsonl").write_text(f"{json.dumps(first)}\n{line}\n")
    for args in (("-m", f"resume={sweep}"), ("task=report", f"run={sweep}")):
        assert here(*args) == 2
        reported = capsys.readouterr().err
        assert "ledger.jsonl" in reported and len(reported.splitlines()) == 1, reported
