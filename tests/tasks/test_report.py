"""task=report: the runs that it reads, its statistics, and the files that it writes."""

import csv
import json
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Commands

from runner.errors import InputError
from runner.records.compared_runs import read_jobs, read_trial
from runner.records.ledger import write_lines, write_state
from runner.records.report.render import as_text, closing, command_of
from runner.records.report.statistics import Summary, mean_of, summarize

PNG = b"\x89PNG\r\n"


def make_run(path: Path, *args: str, state: str = "finished", accuracy: float | None = None, **facts: Any) -> Path:
    """Write the directory of a run without training."""
    path.mkdir(parents=True)
    (path / "overrides.yaml").write_text(yaml.safe_dump(list(args)))
    settings = {"launcher": {"_target_": "runner.launchers.env.Env"}, "optimizer": {"lr": 0.1}, "seed": 0}
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    monitor = {"name": "val/accuracy", "direction": "max"}
    metrics = {} if accuracy is None else {"val/accuracy": accuracy, "val/loss": 1 - accuracy}
    result = {"state": state, "metrics": metrics, "model": "mlp", "world_size": 1, "seconds": 2.0, "error": None}
    (path / "result.json").write_text(json.dumps(result | {"monitor": monitor} | facts))
    lines = [{"step": step, "epoch": 1, "val/accuracy": (accuracy or 0) * step / 10} for step in (5, 10)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 11, "va')
    return path


def make_sweep(directory: Path) -> Path:
    """Write a sweep: lr=0.1 with two seeds, 0.2 with one and a failed one, 0.3 refused, 0.4 waiting."""
    path = directory / "outputs" / "run" / "sweep-1"
    jobs = [("0.1", 0, 0.5), ("0.1", 1, 0.7), ("0.2", 0, 0.9), ("0.2", 1, None), ("0.3", 0, None), ("0.4", 0, None)]
    labels = [f"{number}-lr-{lr}_seed-{seed}" for number, (lr, seed, _) in enumerate(jobs)]
    for number, ((lr, seed, accuracy), label) in enumerate(zip(jobs, labels, strict=True)):
        args = ["model=mlp", f"optimizer.lr={lr}", f"seed={seed}"]
        path.mkdir(parents=True, exist_ok=True)
        write_lines(path, {"number": number, "label": label, "overrides": args})
        if accuracy is not None:
            write_state(path, number, "running")
            make_run(path / label, *args, accuracy=accuracy, samples_per_second=100.0 * (number + 1))
            write_state(path, number, "finished", metrics={"val/accuracy": accuracy})
    write_state(path, 3, "running")
    args = ["model=mlp", "optimizer.lr=0.2", "seed=1"]
    make_run(path / labels[3], *args, state="failed", error="Traceback:\nArithmeticError: lost\n")
    write_state(path, 3, "failed", error="ArithmeticError: lost")
    write_state(path, 4, "refused", error="optimizer.lr=0.3 is odd")
    return path


def test_the_deviation_is_the_sample_standard_deviation() -> None:
    mean = mean_of([0.5, 0.7])
    assert mean.value == pytest.approx(0.6) and mean.deviation == pytest.approx(math.sqrt(0.02))
    assert str(mean) == "0.6000 ± 0.1414"
    assert str(mean_of([0.25])) == "0.2500" and str(mean_of([1500.0, 2500.0])) == "2,000.00 ± 707.11"
    assert mean_of([1.0, math.nan]).deviation is None
    assert str(mean_of([1500.0, 2500.0]).rounded()) == "2,000 ± 707"


def test_jobs_that_differ_only_in_the_seed_are_one_row_and_the_best_row_comes_first(tmp_path: Path) -> None:
    summary = summarize(read_jobs(make_sweep(tmp_path), "run"))
    assert (summary.metric, summary.direction, summary.keys) == ("val/accuracy", "max", ["optimizer.lr"])
    counts = {row.values["optimizer.lr"]: len(row.finished) for row in summary.rows}
    assert list(counts.items()) == [("0.2", 1), ("0.1", 2), ("0.3", 0), ("0.4", 0)]
    assert str(summary.rows[1].means["val/accuracy"]) == "0.6000 ± 0.1414"
    effects = {value: mean.value for value, mean in summary.effects["optimizer.lr"]}
    assert effects == {"0.1": pytest.approx(0.6), "0.2": pytest.approx(0.9)}
    assert [(job.state, (job.error or "").strip().splitlines()[-1:]) for job in summary.unfinished] == [
        ("failed", ["ArithmeticError: lost"]),
        ("refused", ["optimizer.lr=0.3 is odd"]),
        ("waiting", []),
    ]
    smallest_first = summarize(read_jobs(tmp_path / "outputs/run/sweep-1", "run"), "val/loss")
    assert smallest_first.direction == "min" and smallest_first.rows[0].values == {"optimizer.lr": "0.2"}


def effect_of(values: list[str], tmp_path: Path) -> Summary:
    runs = [make_run(tmp_path / str(n), f"optimizer.lr={v}", accuracy=n / 100) for n, v in enumerate(values)]
    return summarize([job for run in runs for job in read_jobs(run, "run")])


def test_many_numbers_have_effects_by_range_and_the_terminal_shows_the_best(tmp_path: Path) -> None:
    few = effect_of(["1e-1", "1e-3", "0.01"], tmp_path / "few")
    assert [value for value, _ in few.effects["optimizer.lr"]] == ["1e-3", "0.01", "1e-1"]
    many = effect_of([f"0.{n:02d}" for n in range(1, 13)], tmp_path / "many")
    ranges = many.effects["optimizer.lr"]
    assert [value for value, _ in ranges] == ["0.01 to 0.03", "0.04 to 0.06", "0.07 to 0.09", "0.10 to 0.12"]
    assert ranges[0][1].value == pytest.approx(0.01) and ranges[3][1].count == 3


def test_the_best_evaluation_is_compared(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / str(n), f"optimizer.lr={n}", accuracy=0.5 + n / 10) for n in range(2)]
    with (paths[0] / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 7, "epoch": 1, "val/accuracy": 0.9, "val/loss": 0.2}\n')
    best, last = (
        summarize([job for path in paths for job in read_jobs(path, "run", value=value)]) for value in ("best", "last")
    )
    assert [row.values["optimizer.lr"] for row in best.rows] == ["0", "1"]
    assert [best.rows[0].means[name].value for name in ("val/accuracy", "val/loss")] == [0.9, 0.2]
    assert [row.values["optimizer.lr"] for row in last.rows] == ["1", "0"]


def test_runs_are_averaged_over_the_chosen_keys(tmp_path: Path) -> None:
    jobs = []
    for number, (fold, lr) in enumerate([(0, 1), (1, 1), (0, 2), (1, 2)]):
        words = (f"data.fold={fold}", f"optimizer.lr={lr}", "seed=0")
        jobs += read_jobs(make_run(tmp_path / str(number), *words, accuracy=number / 10), "run")
    summary = summarize(jobs, over=["data.fold"])
    assert summary.keys == ["optimizer.lr"] and [len(row.finished) for row in summary.rows] == [2, 2]
    text = as_text(summary)
    assert "over 2 runs that differ in data.fold" in text
    assert "  python -m runner optimizer.lr=2 seed=0" in text.splitlines()
    with pytest.raises(InputError, match=r"report.over=data.flod: .*did you mean data.fold"):
        summarize(jobs, over=["data.flod"])


def test_missing_configurations_of_a_grid_are_named_with_the_command_that_adds_them(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep-1"
    cells = [(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1), (0.3, 0)]
    for number, (lr, seed) in enumerate(cells):
        make_run(sweep / str(number), f"optimizer.lr={lr}", f"seed={seed}", accuracy=0.5)
        write_lines(
            sweep, {"number": number, "label": str(number), "overrides": [f"optimizer.lr={lr}", f"seed={seed}"]}
        )
        write_state(sweep, number, "running")
    text = as_text(summarize(read_jobs(sweep, "run")))
    assert "1 missing of the grid: optimizer.lr=0.3 seed=1\n" in text
    assert f"  python -m runner -m resume={sweep} optimizer.lr=0.1,0.2,0.3 seed=0,1" in text.splitlines()
    assert "1 missing of the grid" in closing(read_jobs(sweep, "run"))  # below the table of a resumed sweep
    assert summarize(read_jobs(sweep, "run")[:4]).missing == []
    assert summarize(read_jobs(sweep, "run")[1:3]).missing == ["optimizer.lr=0.1 seed=0", "optimizer.lr=0.2 seed=1"]


def test_non_finite_values_come_last(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(n), f"optimizer.lr={n}", accuracy=v) for n, v in enumerate([math.nan, 0.1, 0.2])]
    summary = summarize([job for run in runs for job in read_jobs(run, "run")])
    assert [row.values["optimizer.lr"] for row in summary.rows] == ["2", "1", "0"]


def test_a_job_without_an_override_has_the_value_of_its_configuration(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "plain", accuracy=0.5)
    other = make_run(tmp_path / "other", "optimizer.lr=0.5", "model=linear", accuracy=0.6, model="linear")
    summary = summarize([*read_jobs(plain, "run"), *read_jobs(other, "run")])
    assert summary.keys == ["optimizer.lr", "model"]
    assert summary.rows[1].values == {"optimizer.lr": "0.1", "model": "mlp"}


def test_the_command_of_a_job_runs_it_again(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", "--config-dir=/my models", "+model.x=a b", "~seed", accuracy=0.5, world_size=2)
    (job,) = read_jobs(path, "run")
    args = ["torchrun", "--nproc-per-node", "2", "-m", "runner", "--config-dir=/my models", "+model.x=a b", "~seed"]
    assert shlex.split(command_of(job)) == args


def test_a_curve_has_one_finite_value_per_step(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", accuracy=0.5)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 5, "val/accuracy": 0.3}\n{"step": 15, "val/accuracy": NaN}\n')
    curves = read_jobs(path, "run")[0].curves("val/accuracy", "val/loss")
    assert {name: [*curve.items()] for name, curve in curves.items()} == {
        "val/accuracy": [(5, 0.3), (10, 0.5)],
        "val/loss": [],
    }


def test_the_report_is_printed_and_written_as_markdown_csv_and_plots(
    here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_sweep(tmp_path)
    assert here("task=report", "run=last") == 0
    output = capsys.readouterr().out
    best = "best optimizer.lr=0.2: val/accuracy 0.9000\n  python -m runner model=mlp optimizer.lr=0.2 seed=0\n"
    assert best in output
    assert "0.6000 ± 0.1414" in output and "ArithmeticError: lost" in output and "optimizer.lr=0.3 is odd" in output
    written = {file.name for file in path.iterdir() if file.is_file()} - {"ledger.jsonl"}
    assert written == {"report.md", "report.csv", "metric_by_key.png", "learning_curves.png"}
    markdown = (path / "report.md").read_text()
    assert "| 0.1 | 0.6000 ± 0.1414 | 0.4000 ± 0.1414 |" in markdown and "](learning_curves.png)" in markdown
    assert "| failed | ArithmeticError: lost |" in markdown
    with (path / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = [(row["optimizer.lr"], row["jobs"], row["finished"]) for row in rows[:2]]
    assert found == [("0.2", "2", "1"), ("0.1", "2", "2")]
    assert float(rows[1]["val/accuracy deviation"]) == pytest.approx(math.sqrt(0.02))
    assert float(rows[1]["samples_per_second"]) == 150
    assert all(plot.read_bytes().startswith(PNG) for plot in path.glob("*.png"))


def test_a_reader_that_closes_the_pipe_does_not_lose_the_report(
    here: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_sweep(tmp_path)

    def write(text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys.stdout, "write", write)
    assert here("task=report", "run=last") == 0
    assert capsys.readouterr().err == "" and (path / "report.csv").exists()


def test_the_report_of_several_sweeps_and_runs_has_its_own_directory(
    here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make_sweep(tmp_path)
    rates = {1: 100.0, 2: 180.0}
    for size, rate in rates.items():
        make_run(tmp_path / f"by-{size}", accuracy=0.8, world_size=size, samples_per_second=rate)
    named = f"report.runs=[{tmp_path}/by-1,{tmp_path}/by-2,{sweep}/0-lr-0.1_seed-0]"
    assert here("task=report", f"run={sweep}", named) == 0
    (directory,) = (tmp_path / "outputs" / "run").glob("report-*")
    assert not (sweep / "report.md").exists()
    with (directory / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(int(row["jobs"]) for row in rows) == 8  # a job that is named twice counts once
    assert {row["world_size"] for row in rows} == {"1", "2"}
    capsys.readouterr()
    assert here("task=report", named, "report.metric=samples_per_second", f"report.output={tmp_path}/o") == 0
    assert capsys.readouterr().out.partition("best ")[2].startswith("world_size=2: samples_per_second 180")
    assert (tmp_path / "o" / "report.md").is_file()


def test_invalid_input_is_refused_and_nothing_is_written(
    here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make_sweep(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "jobless").mkdir()
    (tmp_path / "jobless" / "ledger.jsonl").touch()
    before = sorted(tmp_path.rglob("*"))
    for args, message in {
        f"task=report run={sweep} report.metric=val/acuracy": "no such metric; did you mean val/accuracy?",
        "task=report run=empty": "is no sweep or run (it has neither ledger.jsonl nor overrides.yaml)",
        "task=report run=jobless": f"run={tmp_path}/jobless: its ledger has no jobs; name another sweep or run",
        "task=report report.runs=[nowhere]": "nowhere is no directory; name one under outputs/",
        "task=report run=last name=other": "run=last: there is no sweep or run under",
        "task=report": "task=report needs the run to read; type run=last",
        "task=report compare.modes=[ddp] run=last": "compare.modes: no effect without task=compare",
    }.items():
        assert here(*args.split()) == 2, args
        assert message in capsys.readouterr().err, args
    assert sorted(tmp_path.rglob("*")) == before


def test_code_that_a_directory_names_is_not_executed(here: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "trap.py").write_text("raise SystemExit('executed')")
    args = (f"--config-dir={tmp_path}/mine", "model=trap", "+model._target_=trap.Trap", "seed=${oc.env:HOME}")
    path = make_run(tmp_path / "run", *args, accuracy=0.5)
    (path / "config.yaml").write_text("model: !!python/object/apply:os.system ['touch executed']\n")
    assert here("task=report", f"run={path}") == 2
    assert not (tmp_path / "executed").exists() and str(tmp_path / "mine") not in sys.path


@pytest.mark.parametrize("text", ["[1]", "{"])
def test_a_run_with_damaged_files_is_named(text: str, tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    jobs = read_jobs(sweep, "run")
    names = ["result.json", "config.yaml", *["metrics.jsonl"] * (text != "{")]
    for job, name in zip(jobs, names, strict=False):
        (job.directory / name).write_text(text)
    damaged = [job for job in read_jobs(sweep, "run") if job.state == "damaged"]
    assert [job.label for job in damaged] == [job.label for job in jobs[: len(names)]]
    assert [name in job.error for name, job in zip(names, damaged, strict=True)] == [True] * len(names)


def test_a_sweep_ends_with_a_comparison_of_its_jobs(tmp_path: Path) -> None:
    output = closing(read_jobs(make_sweep(tmp_path), "run"))
    assert "0.6000 ± 0.1414" in output and "best optimizer.lr=0.2" in output
    assert "lost" not in output and "0.4 " not in output.partition("best")[0]  # unfinished jobs are listed earlier
    assert closing(read_jobs(make_run(tmp_path / "one", accuracy=0.5), "run")) == ""
    failed = read_jobs(make_run(tmp_path / "failed", state="failed", error="RuntimeError: no"), "run")
    assert "RuntimeError: no" in as_text(summarize(failed)) and "best" not in as_text(summarize(failed))
    with pytest.raises(InputError, match="no job has finished with a metric"):
        summarize(failed, "val/loss")


@pytest.mark.thorough
def test_only_one_of_several_ranks_reports(tmp_path: Path, commands: Commands) -> None:
    sweep = make_sweep(tmp_path)
    done = commands.forked_world(2, "task=report", f"run={sweep}")
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    assert [each.stdout.count("best optimizer.lr=0.2") for each in done] == [1, 0]


def test_the_first_trial_of_a_study_varies_the_keys_with_ranges(tmp_path: Path) -> None:
    requested = ["optimizer.lr=interval(0.01,0.1)", "batch_size=choice(32,64)", "epochs=2"]
    write_lines(
        tmp_path,
        {"sweep": {"typed": requested, "config_dirs": [], "command": [], "shared": {}}},
        {"number": 0, "label": "0-a", "overrides": ["epochs=2", "optimizer.lr=0.05", "batch_size=32"], "trial": 0},
    )
    assert read_trial(tmp_path / "0-a").overrides == {"optimizer.lr": "0.05", "batch_size": "32"}
