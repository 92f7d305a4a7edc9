"""task=report: what it reads, how it counts, what it writes."""

import csv
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Commands

from runner.errors import InputError
from runner.main import main
from runner.runs.ledger import write_lines, write_state
from runner.runs.records import read_jobs, read_trial
from runner.runs.report.render import as_text, closing, command_of
from runner.runs.report.statistics import Summary, mean_of, show, summarize

PNG = b"\x89PNG\r\n"


def make_run(path: Path, *words: str, state: str = "finished", accuracy: float | None = None, **facts: Any) -> Path:
    """A run's directory as the runner leaves it, without the hours that it takes."""
    path.mkdir(parents=True)
    (path / "overrides.yaml").write_text(yaml.safe_dump(list(words)))
    settings = {"launcher": {"_target_": "runner.launchers.env.Env"}, "optimizer": {"lr": 0.1}, "seed": 0}
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    metrics = {} if accuracy is None else {"val/accuracy": accuracy, "val/loss": 1 - accuracy}
    result = {"state": state, "metrics": metrics, "model": "mlp", "world_size": 1, "seconds": 2.0, "error": None}
    (path / "result.json").write_text(json.dumps(result | facts))
    lines = [{"step": step, "epoch": 1, "val/accuracy": (accuracy or 0) * step / 10} for step in (5, 10)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 11, "va')
    return path


def make_sweep(folder: Path) -> Path:
    """lr 0.1 over two seeds, 0.2 over one and a failure, 0.3 refused, 0.4 waiting."""
    path = folder / "outputs" / "run" / "sweep-1"
    jobs = [("0.1", 0, 0.5), ("0.1", 1, 0.7), ("0.2", 0, 0.9), ("0.2", 1, None), ("0.3", 0, None), ("0.4", 0, None)]
    labels = [f"{number}-lr-{lr}_seed-{seed}" for number, (lr, seed, _) in enumerate(jobs)]
    for number, ((lr, seed, accuracy), label) in enumerate(zip(jobs, labels, strict=True)):
        words = ["model=mlp", f"optimizer.lr={lr}", f"seed={seed}"]
        write_head = {"number": number, "label": label, "overrides": words}
        path.mkdir(parents=True, exist_ok=True)
        write_lines(path, write_head)
        if accuracy is not None:
            write_state(path, number, "running")
            make_run(path / label, *words, accuracy=accuracy, samples_per_second=100.0 * (number + 1))
            write_state(path, number, "finished", metrics={"val/accuracy": accuracy})
    write_state(path, 3, "running")
    make_run(path / labels[3], *jobs_words(jobs[3]), state="failed", error="Traceback:\nArithmeticError: lost\n")
    write_state(path, 3, "failed", error="ArithmeticError: lost")
    write_state(path, 4, "refused", error="optimizer.lr=0.3 is odd")
    return path


def jobs_words(job: tuple[str, int, float | None]) -> list[str]:
    return ["model=mlp", f"optimizer.lr={job[0]}", f"seed={job[1]}"]


def report(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["runner", *(["task=report"] if "task=train" not in words else []), *words])
    return main()


def test_mean_and_deviation_are_those_of_the_sample() -> None:
    mean = mean_of([0.5, 0.7])
    assert mean.value == pytest.approx(0.6) and mean.deviation == pytest.approx(math.sqrt(0.02))
    assert str(mean) == "0.6000 ± 0.1414"
    assert str(mean_of([0.25])) == "0.2500" and str(mean_of([1500.0, 2500.0])) == "2,000 ± 707"
    assert mean_of([1.0, math.nan]).deviation is None
    assert show(0.00001234) == "1.234e-05" and show(0.0) == "0.0000"


def test_jobs_that_differ_in_the_seed_alone_are_one_row_and_the_best_comes_first(tmp_path: Path) -> None:
    summary = summarize(read_jobs(make_sweep(tmp_path), "run"))
    assert (summary.metric, summary.descending, summary.keys) == ("val/accuracy", True, ["optimizer.lr"])
    assert [(row.values["optimizer.lr"], len(row.finished)) for row in summary.rows] == [
        ("0.2", 1),
        ("0.1", 2),
        ("0.3", 0),
        ("0.4", 0),
    ]
    assert str(summary.rows[1].means["val/accuracy"]) == "0.6000 ± 0.1414"
    assert [(value, mean.value) for value, mean in summary.effects["optimizer.lr"]] == [
        ("0.1", pytest.approx(0.6)),
        ("0.2", pytest.approx(0.9)),
    ]
    assert [(job.state, job.error.strip().splitlines()[-1:]) for job in summary.unfinished] == [
        ("failed", ["ArithmeticError: lost"]),
        ("refused", ["optimizer.lr=0.3 is odd"]),
        ("waiting", []),
    ]
    smallest_first = summarize(read_jobs(tmp_path / "outputs/run/sweep-1", "run"), "val/loss")
    assert not smallest_first.descending and smallest_first.rows[0].values == {"optimizer.lr": "0.2"}
    turned = summarize(read_jobs(tmp_path / "outputs/run/sweep-1", "run"), "val/loss", "max")
    assert turned.rows[0].values == {"optimizer.lr": "0.1"}


def effect_of(values: list[str], tmp_path: Path) -> Summary:
    runs = [make_run(tmp_path / str(n), f"optimizer.lr={v}", accuracy=n / 100) for n, v in enumerate(values)]
    return summarize([job for run in runs for job in read_jobs(run, "run")])


def test_numbers_are_in_their_order_and_many_are_told_in_ranges(tmp_path: Path) -> None:
    few = effect_of(["1e-1", "1e-3", "0.01"], tmp_path / "few")
    assert [value for value, _ in few.effects["optimizer.lr"]] == ["1e-3", "0.01", "1e-1"]
    many = effect_of([f"0.{n:02d}" for n in range(1, 13)], tmp_path / "many")
    ranges = many.effects["optimizer.lr"]
    assert [value for value, _ in ranges] == ["0.01 to 0.03", "0.04 to 0.06", "0.07 to 0.09", "0.10 to 0.12"]
    assert ranges[0][1].value == pytest.approx(0.01) and ranges[3][1].count == 3


def test_the_terminal_shows_the_best_of_many(tmp_path: Path) -> None:
    summary = effect_of([f"0.{n:02d}" for n in range(1, 33)], tmp_path)
    text = as_text(summary)
    assert "\n        0.32" in text and "\n        0.03" in text and "\n        0.02" not in text
    assert "and 2 more, which task=report writes in report.md" in text


def test_a_value_that_no_number_is_comes_last(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(n), f"optimizer.lr={n}", accuracy=v) for n, v in enumerate([math.nan, 0.1, 0.2])]
    summary = summarize([job for run in runs for job in read_jobs(run, "run")])
    assert [row.values["optimizer.lr"] for row in summary.rows] == ["2", "1", "0"]


def test_a_job_that_did_not_type_the_key_has_its_configured_value(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "plain", accuracy=0.5)
    typed = make_run(tmp_path / "typed", "optimizer.lr=0.5", "model=linear", accuracy=0.6, model="linear")
    summary = summarize([*read_jobs(plain, "run"), *read_jobs(typed, "run")])
    assert summary.keys == ["optimizer.lr", "model"]
    assert summary.rows[1].values == {"optimizer.lr": "0.1", "model": "mlp"}


def test_the_command_of_a_job_starts_it_again(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", "--config-dir=/my models", "+model.x=a b", "~seed", accuracy=0.5, world_size=2)
    (job,) = read_jobs(path, "run")
    words = ["torchrun", "--nproc-per-node", "2", "-m", "runner", "--config-dir=/my models", "+model.x=a b", "~seed"]
    assert shlex.split(command_of(job)) == words


def test_a_curve_has_one_value_per_step(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", accuracy=0.5)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 5, "val/accuracy": 0.3}\n{"step": 15, "val/accuracy": NaN}\n')
    assert read_jobs(path, "run")[0].curve("val/accuracy") == [(5, 0.3), (10, 0.5)]


def test_it_is_printed_and_kept_as_markdown_csv_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_sweep(tmp_path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert report(tmp_path, monkeypatch, "run=last") == 0
    said = capsys.readouterr().out
    assert "best optimizer.lr=0.2: val/accuracy 0.9000\n  python -m runner model=mlp optimizer.lr=0.2 seed=0\n" in said
    assert "0.6000 ± 0.1414" in said and "ArithmeticError: lost" in said and "optimizer.lr=0.3 is odd" in said
    assert {file: file.read_bytes() for file in before} == before
    written = {file.name for file in path.iterdir() if file.is_file()} - {"ledger.jsonl"}
    assert written == {"report.md", "report.csv", "metric_by_key.png", "learning_curves.png"}
    markdown = (path / "report.md").read_text()
    assert "| 0.1 | 0.6000 ± 0.1414 | 0.4000 ± 0.1414 |" in markdown and "](learning_curves.png)" in markdown
    assert "| failed | ArithmeticError: lost |" in markdown
    with (path / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["optimizer.lr"], row["jobs"], row["finished"]) for row in rows[:2]] == [
        ("0.2", "2", "1"),
        ("0.1", "2", "2"),
    ]
    assert float(rows[1]["val/accuracy deviation"]) == pytest.approx(math.sqrt(0.02))
    assert float(rows[1]["samples_per_second"]) == 150
    for picture in path.glob("*.png"):
        assert picture.read_bytes().startswith(PNG) and picture.stat().st_size > 5000


def test_several_sweeps_and_runs_are_one_report_in_a_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make_sweep(tmp_path)
    rates = {1: 100.0, 2: 180.0}
    for size, rate in rates.items():
        make_run(tmp_path / f"by-{size}", accuracy=0.8, world_size=size, samples_per_second=rate)
    named = f"report.runs=[{tmp_path}/by-1,{tmp_path}/by-2,{sweep}/0-lr-0.1_seed-0]"
    assert report(tmp_path, monkeypatch, f"run={sweep}", named) == 0
    (folder,) = (tmp_path / "outputs" / "run").glob("report-*")
    assert not (sweep / "report.md").exists()
    with (folder / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(int(row["jobs"]) for row in rows) == 8  # the one that is named twice counts once
    assert {row["world_size"] for row in rows} == {"1", "2"}
    assert (folder / "throughput.png").read_bytes().startswith(PNG)
    capsys.readouterr()
    assert report(tmp_path, monkeypatch, named, "report.metric=samples_per_second", f"report.output={tmp_path}/o") == 0
    assert capsys.readouterr().out.partition("best ")[2].startswith("world_size=2: samples_per_second 180")
    assert (tmp_path / "o" / "report.md").is_file()


def test_wrong_input_is_refused_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make_sweep(tmp_path)
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for words, said in {
        f"run={sweep} report.metric=val/acuracy": "report.metric=val/acuracy: no such metric; did you mean val/accur",
        f"run={sweep} report.direction=up": "report.direction=up must be one of max, min",
        "run=empty": "is no sweep or run (it has neither ledger.jsonl nor overrides.yaml)",
        "report.runs=[nowhere]": "nowhere is no directory; name one under outputs/",
        "run=last name=other": "run=last: there is no sweep or run under",
        "": "task=report needs the run to read; type run=last",
        "task=train report.metric=val/loss": "report.metric: no effect without task=report",
        "compare.modes=[ddp] run=last": "compare.modes: no effect without task=compare",
    }.items():
        assert report(tmp_path, monkeypatch, *words.split()) == 2, words
        assert said in capsys.readouterr().err, words
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_that_a_directory_names_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "trap.py").write_text("raise SystemExit('executed')")
    words = (f"--config-dir={tmp_path}/mine", "model=trap", "+model._target_=trap.Trap", "seed=${oc.env:HOME}")
    path = make_run(tmp_path / "run", *words, accuracy=0.5)
    (path / "config.yaml").write_text("model: !!python/object/apply:os.system ['touch executed']\n")
    assert report(tmp_path, monkeypatch, f"run={path}") == 2
    assert not (tmp_path / "executed").exists() and str(tmp_path / "mine") not in sys.path


@pytest.mark.parametrize("text", ["[1]", "{", "", "null", '"x"'])
def test_a_run_whose_files_are_no_records_is_left_out(text: str, tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    jobs = read_jobs(sweep, "run")
    names = ["result.json", "config.yaml", *(["metrics.jsonl"] if text not in ("{", "") else [])]
    for job, name in zip(jobs, names, strict=False):
        (job.directory / name).write_text(text)
    left_out: list[str] = []
    left = read_jobs(sweep, "run", left_out=left_out)
    assert [job.label for job in left] == [job.label for job in jobs[len(names) :]]
    assert [name in line for name, line in zip(names, left_out, strict=True)] == [True] * len(names)


def test_jobs_of_which_none_has_finished_are_listed(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", state="failed", error="RuntimeError: no")
    text = as_text(summarize(read_jobs(path, "run")))
    assert "RuntimeError: no" in text and "best" not in text
    with pytest.raises(InputError, match="no job has finished with any"):
        summarize(read_jobs(path, "run"), "val/loss")


def test_the_end_of_a_sweep_says_how_its_jobs_compare(tmp_path: Path) -> None:
    said = closing(read_jobs(make_sweep(tmp_path), "run"))
    assert "0.6000 ± 0.1414" in said and "best optimizer.lr=0.2" in said
    assert "lost" not in said and "0.4 " not in said.partition("best")[0]  # the jobs without a result are listed before
    assert closing(read_jobs(make_run(tmp_path / "one", accuracy=0.5), "run")) == ""


@pytest.mark.thorough
def test_on_several_ranks_one_of_them_reports(tmp_path: Path, commands: Commands) -> None:
    sweep = make_sweep(tmp_path)
    done = commands.torchrun(2, "task=report", f"run={sweep}")
    assert done.returncode == 0 and done.stdout.count("best optimizer.lr=0.2") == 1, done.stdout + done.stderr


def test_the_first_trial_of_a_study_varies_what_was_typed_as_a_range(tmp_path: Path) -> None:
    typed = ["optimizer.lr=interval(0.01,0.1)", "batch_size=choice(32,64)", "epochs=2"]
    write_lines(
        tmp_path,
        {"sweep": {"typed": typed, "config_dir": None, "command": [], "shared": {}}},
        {"number": 0, "label": "0-a", "overrides": ["epochs=2", "optimizer.lr=0.05", "batch_size=32"], "trial": 0},
    )
    assert read_trial(tmp_path / "0-a").words == {"optimizer.lr": "0.05", "batch_size": "32"}
