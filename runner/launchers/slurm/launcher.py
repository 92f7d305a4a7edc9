"""Slurm: the run as a batch job, shown, submitted or waited for."""

import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from runner.config.schema import Config
from runner.distributed.environment import RankInfo
from runner.distributed.signals import INTERRUPTED, Stopped, interruptible
from runner.errors import InputError, JobFailed
from runner.launchers.env import checked_timeout
from runner.launchers.slurm.queue import OVER, ended, state_of
from runner.launchers.slurm.script import Code, Environment, Resources, Work, render
from runner.runs.code_state import listed
from runner.runs.frozen_code import freeze, remember, take_state
from runner.runs.run_directory import Request, new_directory, read_result

# What the launcher's own options say, or the script relies on.
ASKED = {"account", "cpus-per-task", "exclusive", "gpus-per-node", "job-name", "nodes", "partition", "time"}
OWN = ASKED | {"array", "chdir", "ntasks", "ntasks-per-node", "open-mode", "output", "requeue", "signal"}
OWN |= {"parsable", "test-only", "wait"}
JOB = Path("slurm") / "job"  # whose id is in this file of the run's directory
POLL_S = 1.0
SBATCH_TIMEOUT_S = 300.0


class Slurm:
    """launcher=slurm; conf/launcher/slurm.yaml says what each option is for."""

    starts_processes = True
    queues = True
    started_on_each = False

    def __init__(
        self,
        nodes: int = 1,
        nproc_per_node: int = 2,
        gpus_per_node: int | None = None,
        cpus_per_node: int | None = None,
        exclusive: bool = False,
        job_name: str | None = None,
        partition: str | None = None,
        account: str | None = None,
        time: str | int | None = None,
        sbatch: Mapping[str, Any] | None = None,
        modules: Sequence[str] = (),
        conda: str | None = None,
        venv: str | None = None,
        setup: Sequence[str] = (),
        env: Mapping[str, Any] | None = None,
        prefix: str | None = None,
        signal_s: int = 120,
        parallel_jobs: int | None = None,
        code: str = "frozen",
        dry_run: bool = False,
        wait: bool = False,
        max_restarts: int = 0,
        join_timeout_s: float = 120.0,
    ):
        counts: dict[str, int | None] = {"nodes": nodes, "nproc_per_node": nproc_per_node, "signal_s": signal_s}
        counts |= {"parallel_jobs": parallel_jobs, "cpus_per_node": cpus_per_node, "gpus_per_node": gpus_per_node}
        for key, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"launcher.{key}={value} must be at least 1")
        if max_restarts < 0:
            raise ValueError(f"launcher.max_restarts={max_restarts} must be at least 0")
        if gpus_per_node is not None and gpus_per_node < nproc_per_node:
            raise ValueError(
                f"launcher.nproc_per_node={nproc_per_node} needs a GPU each, and launcher.gpus_per_node="
                f"{gpus_per_node}; make them equal"
            )
        if isinstance(time, int) and time >= 60:
            text = f"{time // 60}:{time % 60:02}:00"
            raise ValueError(
                f"launcher.time={time} must be below 60 as a number of minutes; if those are meant, write '{text}' "
                "with its quotes (YAML reads an unquoted 8:00:00 as 28800)"
            )
        for key in sbatch or {}:
            if key.replace("_", "-") in OWN:
                raise ValueError(f"launcher.sbatch.{key}: the launcher sets it itself, see --help for its own options")
        if conda and venv:
            raise ValueError(f"launcher.conda={conda} and launcher.venv={venv}: one environment at a time")
        if code not in ("frozen", "live"):
            raise ValueError(
                f"launcher.code={code} must be frozen (as it is when the job is submitted) or live (when it starts)"
            )
        self.nproc_per_node, self.code = nproc_per_node, code
        self._submitted: list[str] = []
        self.name, self.dry_run, self.wait = job_name, dry_run, wait
        self.join_timeout_s = checked_timeout(join_timeout_s)
        self.python = "python" if conda or venv or prefix else sys.executable
        options: dict[str, Any] = {
            "nodes": nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": cpus_per_node or (None if exclusive else nproc_per_node),
            "gpus-per-node": gpus_per_node,
            "exclusive": exclusive,
            "partition": partition,
            "account": account,
            "time": time,
            **{key.replace("_", "-"): value for key, value in (sbatch or {}).items()},
        }
        self.resources = Resources(options, signal_s, parallel_jobs, math.ceil(join_timeout_s), max_restarts)
        variables = {name: str(value) for name, value in (env or {}).items()}
        self.environment = Environment(modules, conda, venv, setup, variables, prefix)

    @property
    def world_size(self) -> int:
        return int(self.resources.options["nodes"]) * self.nproc_per_node

    def launch(self, config: Config, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Show, submit or wait for the job. Returns the metrics of a job that was waited for."""
        directory = Path(request.directory) if request.directory else None
        if self.dry_run:
            directory = directory or Path(config.outputs).absolute() / config.name / "STAMP"
            print(self._script(config, directory, [(directory, request)], directory / "slurm" / "%j.log")[0], end="")
            return {}
        _check_commands()
        made = directory is None
        directory = directory or new_directory(config.outputs, config.name)
        if (earlier := _job_of(directory)) and not ended([earlier]):
            raise InputError(
                f"{directory} is that of job {earlier}, which is in the queue; `scancel {earlier}` ends it"
            )
        try:
            script, note = self._script(config, directory, [(directory, request)], directory / "slurm" / "%j.log")
            job = submit(script, directory)
        except InputError:
            if made:
                shutil.rmtree(directory)
            raise
        print(f"submitted job {job}\nrun directory: {directory}{note}", flush=True)
        return follow(job, directory) if self.wait else {}

    def max_jobs(self) -> int:
        """The tasks that an array may have; 1,001 where Slurm is not there to be asked."""
        said = ""
        if shutil.which("scontrol"):
            asked = ("scontrol", "show", "config")
            with suppress(subprocess.TimeoutExpired):
                said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False).stdout
        limits = [int(number) for number in re.findall(r"\b(?:MaxArraySize\s*|max_array_tasks)=\s*(\d+)", said)]
        return max(min(limits, default=1001), 1)

    def submit_sweep(self, jobs: Sequence[tuple[Config, Request]], directory: Path) -> list[str]:
        """Show or submit the jobs of a sweep as one array. Returns their names in the queue; none of those shown."""
        if self._submitted and self.resources.parallel_jobs:
            # The limit is of one array: this one begins when the last has ended.
            after = {"dependency": f"afterany:{self._submitted[-1].partition('_')[0]}"}
            self.resources = replace(self.resources, options={**self.resources.options, **after})
        works = [(Path(str(request.directory)), request) for _, request in jobs]
        log = directory / "slurm" / ("%A_%a.log" if len(works) > 1 else "%j.log")
        script, note = self._script(jobs[0][0], directory, works, log)
        if self.dry_run:
            print(script, end="")
            return []
        _check_commands()
        job = submit(script, directory, name=f"jobs-{min(_number(work) for work, _ in works)}.sh")
        print(f"submitted {len(works)} jobs as job {job}\nsweep directory: {directory}{note}", flush=True)
        names = [f"{job}_{number}" for number in range(len(works))] if len(works) > 1 else [job]
        self._submitted += names
        return names

    def wait_for_sweep(self) -> bool:
        """With launcher.wait, return when every job of the sweep has ended. Returns whether that was waited for."""
        left = self._submitted
        try:
            with interruptible():
                while self.wait and (left := sorted({*left} - ended(left))):
                    time.sleep(POLL_S)
        except (KeyboardInterrupt, Stopped):
            _leave(*dict.fromkeys(job.partition("_")[0] for job in left))
        return self.wait

    def _script(
        self, config: Config, directory: Path, runs: Sequence[tuple[Path, Request]], log: Path
    ) -> tuple[str, str]:
        """The script that does the runs, and what to tell of their code, which is kept in the directory.

        Raises InputError where it cannot be kept.
        """
        code, folders, note = Code(), list(runs[0][1].config_dirs), ""
        if self.code == "frozen":
            frozen = freeze(directory, folders, write=not self.dry_run)
            code, folders = Code(frozen=frozen.folder), frozen.config_dirs
            if frozen.changed:
                note = f"\ncode: as of {frozen.since}, since when these have changed: {listed(frozen.changed)}"
        elif self.dry_run:
            code = Code(submitted=directory / "slurm" / "code.json")
        else:
            code = Code(submitted=remember(directory, take_state(folders)))
        options = {"job-name": self.name or config.name, "chdir": str(Path.cwd()), **self.resources.options}
        resources = replace(self.resources, options=options)
        works = [_work(path, request, folders) for path, request in runs]
        return render(resources, self.environment, works, log, self.python, self.nproc_per_node, code), note


def _work(directory: Path, request: Request, config_dirs: Sequence[str]) -> Work:
    """The words of the run inside the job, where runner.launch finds itself in the job and queues no other."""
    kept = [word for word in request.overrides if not word.lstrip("+").startswith("launcher.dry_run=")]
    return Work(directory, [*(f"--config-dir={folder}" for folder in config_dirs), *kept])


def _number(directory: Path) -> int:
    """Of a job of a sweep, whose directory begins with it."""
    return int(directory.name.partition("-")[0])


def submit(script: str, directory: Path, name: str = "job.sh") -> str:
    """Keep the script and hand it to sbatch. Returns the job's id. Raises InputError where sbatch refuses it."""
    (directory / "slurm").mkdir(exist_ok=True)
    path = directory / "slurm" / name
    path.write_text(script)
    words = ["sbatch", "--parsable", str(path)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SBATCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(
            f"launcher=slurm: sbatch has not answered for {SBATCH_TIMEOUT_S:g} s; squeue tells if it has taken a job"
        ) from None
    if done.returncode:
        raise InputError(f"launcher=slurm: sbatch says: {' '.join(done.stderr.split())}")
    job = done.stdout.strip().split(";")[0]  # a federation adds the cluster
    (directory / JOB).write_text(f"{job}\n")
    return job


def _job_of(directory: Path) -> str | None:
    """That was last submitted for the directory."""
    return (directory / JOB).read_text().strip() if (directory / JOB).exists() else None


def follow(job: str, directory: Path) -> dict[str, float]:
    """Print the job's log as it grows, until the job has ended. Returns the run's metrics.

    Raises JobFailed where the job did not end well; a requeue is no end.
    """
    log, read = directory / "slurm" / f"{job}.log", 0
    state, status = "PENDING", 1
    try:
        with interruptible():
            while state not in OVER:
                time.sleep(POLL_S)
                state, status = state_of(job)
                if log.exists():
                    with log.open(errors="replace") as file:
                        file.seek(read)
                        print(file.read(), end="", flush=True)
                        read = file.tell()
    except (KeyboardInterrupt, Stopped):
        _leave(job)
    result = read_result(directory) or {}
    if state == "COMPLETED" and result.get("state") == "finished":
        return result["metrics"]
    text = f"job {job} ended {state}, status {status}; its log is {log}"
    print(text, file=sys.stderr, flush=True)
    raise JobFailed(text, status or 1)


def _leave(*jobs: str) -> NoReturn:
    print(f"\njob {', '.join(jobs)} keeps running; `scancel {' '.join(jobs)}` ends it", file=sys.stderr, flush=True)
    raise SystemExit(INTERRUPTED)


def _check_commands() -> None:
    if shutil.which("sbatch") is None:
        raise InputError(
            "launcher=slurm needs sbatch, which is not on this machine; launcher.dry_run=true shows the script, and "
            "launcher=spawn runs here"
        )
