"""Generate many run directories, and time reports, `runner.runs`, `runner.table` and `runs list` on them.

usage: python benchmarks/listing.py [NUM_RUNS]. The directories are temporary, and in the cache of the
file system.
"""

import contextlib
import io
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

import runner
from runner.api.run_commands import run_command
from runner.records.compared_runs import read_jobs
from runner.records.ledger import write_lines
from runner.records.report.plots import draw
from runner.records.report.render import as_csv, as_markdown, as_text
from runner.records.report.statistics import summarize
from runner.records.run_record import RunRecord
from runner.sweeps.queues import read_jobs_and_queues

NUM_RUNS = 20_000
CHANGED = ("optimizer.lr", "batch_size", "seed")


def generate(folder: Path, num_runs: int) -> Path:
    """Write half of the runs as the jobs of a sweep, which is returned, and half as single runs."""
    config = asdict(runner.compose(["model=mlp"]))
    text = yaml.safe_dump(config, sort_keys=False)
    versions = {name: "1.2.3" for name in ("python", "torch", "numpy", "hydra-core", "omegaconf", "runner")}
    sweep = folder / "run" / "sweep-20260101-000000"
    lines: list[dict[str, Any]] = []
    for number in range(num_runs):
        values = (0.001 * (1 + number % 20), 2 ** (4 + number // 20 % 5), number // 100)
        overrides = [f"{key}={value}" for key, value in zip(CHANGED, values, strict=True)]
        is_job, accuracy = number < num_runs // 2, 1 / (2 + number % 97)
        run = sweep / f"{number}-lr-{values[0]:g}" if is_job else folder / "run" / f"20260102-000000-{number}"
        (run / "checkpoints" / "step_230").mkdir(parents=True)
        if is_job:
            lines.append({"number": number, "label": run.name, "overrides": overrides})
            lines.append({"number": number, "state": "running", "at": 1767225600.0 + number})
            lines.append({"number": number, "state": "finished", "at": 1767225601.0 + number, "metrics": {}})
        record = RunRecord(
            run,
            state="finished",
            metrics={"train/loss": 0.1, "val/accuracy": accuracy, "val/loss": 1 - accuracy},
            monitor={"name": "val/accuracy", "direction": "max"},
            best={"step": 230, "value": accuracy},
            step=230,
            epoch=10,
            model="mlp",
            data="digits",
            parallel="none",
            seed=values[2],
            versions=versions,
            command=["python", "-m", "runner", *overrides],
            started=f"2026-01-02T00:{number // 60 % 60:02}:{number % 60:02}.000+00:00",
        )
        (run / "result.json").write_text(json.dumps(record.as_result(), indent=1))
        (run / "config.yaml").write_text(text.replace("seed: 0", f"seed: {values[2]}"))
        (run / "overrides.yaml").write_text(yaml.safe_dump(["model=mlp", *overrides[: 2 + number % 2]]))
        logged = [{"step": step, "epoch": step // 23, "val/accuracy": accuracy} for step in range(23, 231, 23)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logged))
        for name in ("log.txt", "attempts.jsonl", "checkpoints/step_230/weights", "checkpoints/step_230/state"):
            (run / name).touch()
    write_lines(sweep, {"sweep": {"typed": [], "config_dirs": [], "command": [], "shared": {}}}, *lines)
    return sweep


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    start, cpu = time.perf_counter(), time.process_time()
    yield
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    print(f"{name:<28} {seconds:6.2f} s, {cpu_s:6.2f} s on the CPU", flush=True)


def main() -> None:
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_RUNS
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, "outputs")
        with timed(f"generate {num_runs:,} runs"):
            sweep = generate(folder, num_runs)
        with timed("runner.runs"):
            found = runner.runs(folder)
        assert len(found) == num_runs
        with timed("runner.table"):
            runner.table(found)
        with timed("states of all runs"):
            assert {run.state for run in found} == {"finished"}
        with timed("report of all runs"):
            directories = [sweep, *(run.path for run in found if run.path.parent != sweep)]
            summary = summarize([job for path in directories for job in read_jobs(path, "run", read_jobs_and_queues)])
            as_text(summary), as_markdown(summary, "", draw(summary, folder)), as_csv(summary)
        for arguments in (["--jobs"], ["--jobs", "--limit", "0", "--sort", "best"], ["--json"]):
            with timed(f"runs list {' '.join(arguments)}"), contextlib.redirect_stdout(io.StringIO()):
                run_command(["list", str(folder), *arguments])


if __name__ == "__main__":
    main()
