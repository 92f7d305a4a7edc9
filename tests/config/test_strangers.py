"""Directories of other users are data: nothing that they name is imported or composed unless they are trusted."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import runner
from runner.errors import InputError

SMALL = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "logger=none", "threads=1", "max_steps=2")
STRANGER = 54321  # a uid of nobody's


@pytest.fixture
def run(tmp_path: Path, here: Callable[..., int]) -> Path:
    assert here(*SMALL) == 0
    return next((tmp_path / "outputs" / "run").iterdir())


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes paths another user's: truly where that is allowed, or else in what is said of them."""
    own: list[Path] = []
    stat = os.stat

    def said(path: object, **options: object) -> os.stat_result:
        found = stat(path, **options)  # type: ignore[arg-type]
        return os.stat_result((*found[:4], STRANGER, *found[5:])) if Path(str(path)) in own else found

    def give(*paths: Path) -> None:
        for path in paths:
            if os.geteuid() == 0:
                os.chown(path, STRANGER, STRANGER)
            else:
                own.append(path)
                monkeypatch.setattr("runner.config.strangers.os.stat", said)

    return give


def trap(tmp_path: Path) -> Path:
    """A folder of options whose Python leaves a sentinel as soon as it is imported."""
    folder = tmp_path / "evil"
    (folder / "model").mkdir(parents=True)
    name = f"trap_{tmp_path.name}"  # of its own: a module stays imported
    touch = f"from pathlib import Path\nPath({str(tmp_path / 'sentinel')!r}).touch()\n"
    (folder / f"{name}.py").write_text(f"{touch}from models.mlp import MLP as Trap\n")
    arguments = "sample_shape: ${data.sample_shape}\nnum_outputs: ${data.num_outputs}\nhidden: [16]\n"
    text = f"_target_: {name}.Trap\n{arguments}"
    (folder / "model" / "mlp.yaml").write_text(text)
    return folder


@pytest.mark.fault("a malicious run directory", outcome="refused")
@pytest.mark.parametrize("whose", ["directory", "overrides.yaml"])
def test_nothing_of_a_stranger_is_imported(
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
    for words in commands:
        capsys.readouterr()
        assert here(*words) == 2, words
        told = capsys.readouterr().err
        assert len(told.splitlines()) == 1 and "=" in told.partition(" ")[0], told
        assert (
            "is of uid 54321, and its overrides.yaml names code to run, --config-dir=" in told
            or "does not hold" in told
        )
    with pytest.raises(InputError, match="names code to run, --config-dir="):
        runner.open_run(run).model()
    assert not (tmp_path / "sentinel").exists()
    assert here("task=evaluate", f"run={run}", f"trust={tmp_path / 'outputs'}") == 0
    assert (tmp_path / "sentinel").exists()
    runner.open_run(run, trust=True).model()


@pytest.mark.fault("a malicious run directory", outcome="refused")
@pytest.mark.parametrize(
    "word",
    [
        "model._target_=os.system",
        "+callbacks.x={_target_: trap.Trap}",
        "hydra.searchpath=[file:///tmp/evil]",
        "model=../../../tmp/evil",
        "data=/tmp/evil",
        "model@data=mlp",
        "name=${oc.env:HOME}",
        "launcher.prefix='sh -c evil'",
    ],
)
def test_a_word_of_a_stranger_chooses_no_code(
    word: str,
    run: Path,
    give_away: Callable[..., None],
    here: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (run / "overrides.yaml").write_text(yaml.safe_dump([*SMALL, word]))
    give_away(run / "overrides.yaml")
    assert here("task=evaluate", f"run={run}") == 2
    assert f"names code to run, {word}" in capsys.readouterr().err


def test_a_stranger_without_code_of_theirs_is_read(
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
def test_the_sweep_of_a_stranger(
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
    assert "resume=last is of uid 54321, and its ledger.jsonl names code to run" in capsys.readouterr().err
    assert here("task=report", "run=last") == 0  # reads it as data
    assert not (tmp_path / "sentinel").exists()


@pytest.mark.fault("a recorded file of another shape", outcome="refused")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("overrides.yaml", "model=mlp"),
        ("overrides.yaml", ""),
        ("overrides.yaml", "- [model=mlp]"),
        ("overrides.yaml", "- model=mlp\n- {"),
        ("config.yaml", "[]"),
        ("config.yaml", "early_stop: 3"),
        ("result.json", "[]"),
        ("result.json", '{"state": '),
        ("metrics.jsonl", "null\n"),
        ("metrics.jsonl", '{"step": null}\n'),
        ("loggers.json", "3"),
    ],
)
def test_a_file_of_another_shape_is_named(
    name: str, text: str, run: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).write_text(text)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert here(f"resume={run}", "max_steps=3") == 2
    told = capsys.readouterr().err
    assert name in told and len(told.splitlines()) == 1, told
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    if name in ("overrides.yaml", "result.json", "metrics.jsonl"):
        assert here("task=report", f"run={run}") == 2
        told = "".join(capsys.readouterr())
        assert "is left out: " in told and name in told, told


@pytest.mark.fault("a recorded file of another shape", outcome="refused")
@pytest.mark.parametrize(
    "line",
    [
        "null",
        '{"number": 7, "label": "../../elsewhere", "overrides": []}',
        '{"number": 7, "label": "7", "overrides": "x"}',
        '{"sweep": []}',
        '{"number": 0, "state": 3, "at": 0}',
    ],
)
def test_a_ledger_of_another_shape_is_named(
    line: str, here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "outputs" / "run" / "sweep-20261122-000000"
    sweep.mkdir(parents=True)
    first = {"sweep": {"typed": ["seed=0"], "config_dirs": [], "command": [], "shared": {}}}
    (sweep / "ledger.jsonl").write_text(f"{json.dumps(first)}\n{line}\n")
    for words in (("-m", f"resume={sweep}"), ("task=report", f"run={sweep}")):
        assert here(*words) == 2
        told = capsys.readouterr().err
        assert "ledger.jsonl" in told and len(told.splitlines()) == 1, told
