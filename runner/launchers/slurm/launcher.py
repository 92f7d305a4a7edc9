"""launcher=slurm: the run as a batch job of Slurm, printed, submitted or waited for."""

import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.config.schema import Config
from runner.distributed.environment import PORTS, RankInfo
from runner.distributed.failures.signals import Stopped, interruptible
from runner.errors import InputError
from runner.launchers.env import check_options
from runner.launchers.protocol import Queue, SubmissionUnknown
from runner.launchers.slurm import script
from runner.launchers.slurm.queue import POLL_S, check_sbatch, find_ended, follow, last_job, leave_queued, submit
from runner.records.frozen_code import EXTRACTED, FrozenCode, freeze
from runner.records.run_directory import Request, new_directory

# Options of sbatch that the launcher sets: from its own options, and because the script depends on them.
OPTIONS = {"account", "cpus-per-task", "exclusive", "gpus-per-node", "job-name", "nodes", "partition", "time"}
RESERVED = OPTIONS | {"array", "chdir", "ntasks", "ntasks-per-node", "open-mode", "output", "requeue", "signal"}
RESERVED |= {"parsable", "test-only", "wait"}
SbatchOption = str | int | bool | None  # True for an option without a value


class Slurm(Queue):
    """launcher=slurm; conf/launcher/slurm.yaml documents the options."""

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
        check_options(join_timeout_s, max_restarts, **counts)
        if gpus_per_node is not None and gpus_per_node < nproc_per_node:
            raise ValueError(
                f"launcher.nproc_per_node={nproc_per_node} needs a GPU each, and launcher.gpus_per_node="
                f"{gpus_per_node} is less; use equal values"
            )
        if isinstance(time, int) and time >= 60:
            text = f"{time // 60}:{time % 60:02}:00"
            raise ValueError(
                f"launcher.time={time} must be below 60 as a number of minutes; for so many minutes, write '{text}' "
                "with its quotes (YAML reads an unquoted 8:00:00 as 28800)"
            )
        for key in sbatch or {}:
            if key.replace("_", "-") in RESERVED:
                raise ValueError(f"launcher.sbatch.{key}: the launcher sets this option; see --help launcher=slurm")
        if conda and venv:
            raise ValueError(f"launcher.conda={conda} and launcher.venv={venv} exclude each other; remove one")
        if code not in ("frozen", "live"):
            raise ValueError(
                f"launcher.code={code} must be frozen (the code at submission) or live (the code when the job starts)"
            )
        self.name, self.code, self.dry_run, self.wait = job_name, code, dry_run, wait
        self.world_size, self.join_timeout_s = nodes * nproc_per_node, join_timeout_s
        self._submitted: list[str] = []  # the names of the sweep's jobs
        self.options: dict[str, SbatchOption] = {
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
        self.python = "python" if conda or venv or prefix else sys.executable
        self.nproc_per_node, self.parallel_jobs, self.max_restarts = nproc_per_node, parallel_jobs, max_restarts
        self.signal_s, self.modules, self.conda, self.venv, self.setup = signal_s, modules, conda, venv, setup
        self.variables, self.prefix = {name: str(value) for name, value in (env or {}).items()}, prefix

    def launch(self, config: Config, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Print the script, or submit the job. Return the metrics of the run if `wait`.

        Raises InputError if the run is in the queue already or sbatch refuses it, SubmissionUnknown if sbatch times
        out, and JobFailed if a job that was waited for has failed.
        """
        directory = Path(request.directory) if request.directory else None
        if self.dry_run:
            directory = directory or Path(config.outputs).absolute() / config.name / "STAMP"
            print(self._script(config, directory, [(directory, request)], directory / "slurm" / "%j.log")[0], end="")
            return {}
        check_sbatch()
        directory = directory or new_directory(config.outputs, config.name)
        previous = last_job(directory)
        if previous and not find_ended([previous]):
            fix = f"`scancel {previous}` ends it" if previous.isdigit() else "`squeue --me` lists its id for scancel"
            raise InputError(f"{directory} belongs to job {previous}, which is in the queue; {fix}")
        try:
            text, note = self._script(config, directory, [(directory, request)], directory / "slurm" / "%j.log")
            job = submit(text, directory)
        except InputError:
            if request.directory is None:
                shutil.rmtree(directory)
            raise
        print(f"submitted job {job}\nrun directory: {directory}{note}", flush=True)
        return follow(job, directory, self.log_file(directory, job)) if self.wait else {}

    def submit_sweep(self, jobs: Sequence[tuple[Config, Request]], directory: Path) -> list[str]:
        """Print or submit the jobs as one job array. Return their names in the queue; none of those printed."""
        if self._submitted and self.parallel_jobs:
            # The limit applies to one array, so this array starts when the previous one has ended.
            self.options["dependency"] = f"afterany:{self._submitted[-1].partition('_')[0]}"
        runs = [(Path(str(request.directory)), request) for _, request in jobs]
        log = directory / "slurm" / ("%A_%a.log" if len(runs) > 1 else "%j.log")
        text, note = self._script(jobs[0][0], directory, runs, log)
        if self.dry_run:
            print(text, end="")
            return []
        check_sbatch()
        first_number = min(int(run.name.partition("-")[0]) for run, _ in runs)
        try:
            job = submit(text, directory, name=f"jobs-{first_number}.sh")
        except SubmissionUnknown as error:
            raise SubmissionUnknown(str(error), error.names * len(runs)) from None
        print(f"submitted {len(runs)} jobs as job {job}\nsweep directory: {directory}{note}", flush=True)
        names = [f"{job}_{number}" for number in range(len(runs))] if len(runs) > 1 else [job]
        self._submitted += names
        return names

    @classmethod
    def find_ended(cls, names: Sequence[str]) -> set[str]:
        return find_ended(names)

    def max_jobs(self) -> int:
        """Return how many tasks an array may have; Slurm's default limit if scontrol does not answer."""
        output = ""
        if shutil.which("scontrol"):
            command = ("scontrol", "show", "config")
            with suppress(subprocess.TimeoutExpired):
                output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
        limits = [int(number) for number in re.findall(r"\b(?:MaxArraySize\s*|max_array_tasks)=\s*(\d+)", output)]
        return max(min(limits, default=1001), 1)

    def wait_for_sweep(self) -> bool:
        """With launcher.wait, return when all jobs of the sweep have ended. Return whether they were waited for."""
        left = self._submitted
        try:
            with interruptible():
                while self.wait and (left := sorted({*left} - find_ended(left))):
                    time.sleep(POLL_S)
        except (KeyboardInterrupt, Stopped):
            leave_queued(*dict.fromkeys(job.partition("_")[0] for job in left))
        return self.wait

    @classmethod
    def log_file(cls, directory: Path, name: str) -> Path:
        return directory / "slurm" / f"{name}.log"

    def _script(
        self, config: Config, directory: Path, runs: Sequence[tuple[Path, Request]], log: Path
    ) -> tuple[str, str]:
        """Return the script of the runs, and a note on the code that `directory` has from an earlier submission.

        Raises InputError if the code cannot be copied.
        """
        code, config_dirs, note = None, list(runs[0][1].config_dirs), ""
        if self.code == "frozen":
            code = freeze(directory, config_dirs, write=not self.dry_run)
            config_dirs = [str(EXTRACTED / path) for path in code.config_dirs]  # in the directory of each run
            if not code.is_new:
                note = f"\ncode: as of {code.since}; remove {code.path} to submit with the current code"
        options = {"job-name": self.name or config.name, "chdir": str(Path.cwd()), **self.options}
        commands = [(path, _arguments(path, request, config_dirs)) for path, request in runs]
        return _render(self, options, commands, log, code), note


def _arguments(directory: Path, request: Request, config_dirs: Sequence[str]) -> list[str]:
    """Return the arguments of the run inside the job, where runner.launch detects the job and submits no other."""
    kept = [override for override in request.overrides if not override.lstrip("+").startswith("launcher.dry_run=")]
    return [*(f"--config-dir={directory / config_dir}" for config_dir in config_dirs), *kept]


def _render(
    slurm: Slurm,
    options: Mapping[str, SbatchOption],
    runs: Sequence[tuple[Path, list[str]]],
    log: Path,
    code: FrozenCode | None,
) -> str:
    """Return the script. Several runs are the tasks of a job array; the path of their log may contain %A and %a.

    options: of sbatch. runs: the directory and the command-line arguments of each run. code: None runs the code that
    exists when the job starts.
    """
    of_code = ("PYTHONPATH", "PYTHONSAFEPATH") if code else ()
    names = ("RUNNER_DIRECTORY", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", *slurm.variables, *of_code)
    variables = [f'{name}="${name}"' for name in names]
    command = [*([slurm.prefix] if slurm.prefix else []), "env", *variables, script.VISIBLE]
    functions = script.FUNCTIONS.format(
        command=" ".join([*command, shlex.quote(slurm.python)]),
        nproc=slurm.nproc_per_node,
        join_s=math.ceil(slurm.join_timeout_s),
        signals=script.SIGNALS,
        restarts=slurm.max_restarts,
    )
    # Ranks that have not saved after the grace period are killed, and the job resumes from the last checkpoint.
    grace_s = max(slurm.signal_s - 20, slurm.signal_s * 3 // 4)
    select_code = ""
    if code is not None:
        archive = shlex.quote(str(code.path))
        select_code = script.FROZEN.format(archive=archive, sha256=code.sha256, extracted=EXTRACTED)
    run = script.RUN.format(ports=len(PORTS), first_port=PORTS[0], grace_s=grace_s, select_code=select_code)
    lines = ["#!/bin/bash", *_directives(slurm, options, log, len(runs)), "", script.TRAP, *_select_run(runs)]
    return "\n".join([*lines, functions, script.SETUP, *_prepare(slurm), run])


def _directives(slurm: Slurm, options: Mapping[str, SbatchOption], log: Path, num_runs: int) -> list[str]:
    options = {**options, "output": str(log), "open-mode": "append", "requeue": True}
    options["signal"] = f"B:USR1@{slurm.signal_s}"  # only to the script
    if num_runs > 1:
        limit = f"%{slurm.parallel_jobs}" if slurm.parallel_jobs else ""
        options["array"] = f"0-{num_runs - 1}{limit}"
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    return [
        f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}") for name, value in given.items()
    ]


def _prepare(slurm: Slurm) -> list[str]:
    lines = []
    for module in slurm.modules:
        lines += _checked(f"module load {shlex.quote(module)}")
    if slurm.conda:
        lines += ['eval "$(conda shell.bash hook)"', *_checked(f"conda activate {shlex.quote(slurm.conda)}")]
    if slurm.venv:
        activate = Path(slurm.venv).expanduser() / "bin" / "activate"
        lines += _checked(f"source {_expanded(str(activate))}")
    lines += [f"export {name}={_expanded(value)}" for name, value in slurm.variables.items()]
    return [*lines, *slurm.setup]


def _checked(line: str) -> list[str]:
    """Return the lines that run a command, and end the job with the command in its error if it fails."""
    return [f"doing={shlex.quote(line)}", f"{line} || exit 1", "doing="]


def _expanded(text: str) -> str:
    """Return one word of bash in which the node's variables are expanded, such as $HOME and $SLURM_TMPDIR."""
    return '"' + re.sub(r'(["`\\])', r"\\\1", text) + '"'


def _select_run(runs: Sequence[tuple[Path, list[str]]]) -> list[str]:
    selected = [
        [f"export RUNNER_DIRECTORY={shlex.quote(str(directory))}", f"overrides=({shlex.join(arguments)})"]
        for directory, arguments in runs
    ]
    if len(selected) == 1:
        return selected[0]
    cases = [line for number, lines in enumerate(selected) for line in (f"{number})", *lines, ";;")]
    return ['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac"]
