"""Tests of other users' directories: no code that they name is imported or composed unless they are trusted."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import runner
from runner.config.resume import add_recorded
from runner.errors import InputError

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
@pytest.mark.parametrize("whose", ["directory", "overrides.yaml"])
def test_untrusted_code_is_not_imported(
    whose: str,
    run: Path,
    give_away: Callable[..., None],
    here: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorded = yaml.safe_load((run / "overrides.yaml").read_text())
    (run / "overrides.yaml").write_text(yaml.safe_dump([f"--config-dir={trap(tmp_path)}", *recorded]))
    give_away(run if whose == "directory" else run / "overrides.yaml")
    commands = [
        (f"resume={run}", "max_steps=3"),
        ("resume=last", "max_steps=3"),
        ("task=evaluate", f"run={run}"),
        ("task=predict", f"run={run}"),
        ("task=export", f"run={run}"),
        ("task=rerun", f"run={run}"),
        ("-m", "task=evaluate", f"run={run}", "seed=0,1"),
        ("task=evaluate", f"run={run}", "--cfg", "job"),
        ("task=evaluate", f"run={run}", f"trust={tmp_path / 'evil'}"),
    ]
    for args in commands:
        capsys.readouterr()
        assert here(*args) == 2, args
        reported = capsys.readouterr().err
        assert len(reported.splitlines()) == 1 and "=" in reported.partition(" ")[0], reported
        assert (
            "belongs to uid 54321, and its overrides.yaml names code to run, --config-dir=" in reported
            or "does not contain" in reported
        )
    with pytest.raises(InputError, match="names code to run, --config-dir="):
        runner.open_run(run).model()
    assert not (tmp_path / "sentinel").exists()
    assert here("task=evaluate", f"run={run}", f"trust={tmp_path / 'outputs'}") == 0
    assert (tmp_path / "sentinel").exists()
    runner.open_run(run, trust=True).model()


@pytest.mark.fault("a malicious run directory", outcome="refused")
def test_untrusted_override_that_names_code_is_refused(run: Path, give_away: Callable[..., None]) -> None:
    give_away(run / "overrides.yaml")
    for word in (
        "model._target_=os.system",
        "+callbacks.x={_target_: trap.Trap}",
        "hydra.searchpath=[file:///tmp/evil]",
        "model=../../../tmp/evil",
        "data=/tmp/evil",
        "model@data=mlp",
        "name=${oc.env:HOME}",
        "launcher.prefix='sh -c evil'",
    ):
        (run / "overrides.yaml").write_text(yaml.safe_dump([*SMALL, word]))
        with pytest.raises(InputError, match=re.escape(f"names code to run, {word}")):
            add_recorded(["task=evaluate", f"run={run}"], [], multirun=False)


def test_untrusted_run_without_custom_code_is_read(
    run: Path, give_away: Callable[..., None], here: Callable[..., int], tmp_path: Path
) -> None:
    give_away(run, run / "overrides.yaml", run / "config.yaml")
    assert here("task=evaluate", f"run={run}") == 0
    runner.open_run(run).model()
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"] = {"_target_": "os.system", "command": f"touch {tmp_path / 'sentinel'}"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    give_away(run / "config.yaml")
    with pytest.raises(InputError, match=r"its config.yaml names code to run, _target_: os\.system"):
        runner.open_run(run).model()
    assert not (tmp_path / "sentinel").exists()


@pytest.mark.fault("a malicious run directory", outcome="refused")
def test_untrusted_sweep_is_only_read_as_data(
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
    assert "resume=last belongs to uid 54321, and its ledger.jsonl names code to run" in capsys.readouterr().err
    assert here("task=report", "run=last") == 0  # reads it as data
    assert not (tmp_path / "sentinel").exists()


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
        assert "is skipped: " in reported and name in reported, reported


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
