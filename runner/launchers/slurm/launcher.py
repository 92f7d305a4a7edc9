"""launcher=slurm: prints or submits a run as a batch job of Slurm, and may wait for it."""

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runner.config.request import Request
from runner.distributed.environment import PORTS, RankInfo
from runner.distributed.failures.signals import Stopped, interruptible
from runner.errors import InputError
from runner.launchers.contract import Queue
from runner.launchers.env import check_gpus, check_options
from runner.launchers.slurm import script
from runner.launchers.slurm.queue import POLL_S, check_sbatch, follow, last_job, leave_queued, query_ended, submit
from runner.records.frozen_code import freeze_code
from runner.records.run_directory import create_directory, new_directory

# Options of sbatch that the launcher sets: from its own options, and because the script depends on them.
RESERVED = {
    *("account", "cpus-per-task", "exclusive", "gpus-per-node", "job-name", "nodes", "partition", "time"),
    *("array", "chdir", "ntasks", "ntasks-per-node", "open-mode", "output", "requeue", "signal"),
    *("parsable", "test-only", "wait"),
}
SbatchOption = str | int | bool | None  # True for an option without a value


@dataclass
class Slurm(Queue):
    """launcher=slurm; conf/launcher/slurm.yaml documents the options."""

    nodes: int = 1
    nproc_per_node: int = 2
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    exclusive: bool = False
    job_name: str | None = None
    partition: str | None = None
    account: str | None = None
    time: str | int | None = None
    sbatch: Mapping[str, Any] | None = None
    modules: Sequence[str] = ()
    conda: str | None = None
    venv: str | None = None
    setup: Sequence[str] = ()
    env: Mapping[str, Any] | None = None
    prefix: str | None = None
    signal_s: int = 120
    parallel_jobs: int | None = None
    code: Literal["frozen", "live"] = "frozen"
    dry_run: bool = False
    wait: bool = False
    max_restarts: int = 0
    join_timeout_s: float = 120.0

    is_elastic = True

    def __post_init__(self) -> None:
        counts = ("nodes", "nproc_per_node", "signal_s", "parallel_jobs", "cpus_per_node", "gpus_per_node")
        check_options(self.join_timeout_s, self.max_restarts, **{name: getattr(self, name) for name in counts})
        check_gpus(self.nproc_per_node, self.gpus_per_node)
        if isinstance(self.time, int) and self.time >= 60:
            raise ValueError(
                f"launcher.time={self.time} must be below 60 as a number of minutes; write a longer time in quotes, as "
                "'8:00:00' (YAML reads an unquoted 8:00:00 as 28800)"
            )
        for key in self.sbatch or {}:
            if key.replace("_", "-") in RESERVED:
                raise ValueError(f"launcher.sbatch.{key}: the launcher sets this option; see --help launcher=slurm")
        if self.conda and self.venv:
            raise ValueError(
                f"launcher.conda={self.conda} and launcher.venv={self.venv} exclude each other; remove one"
            )
        self.world_size = self.nodes * self.nproc_per_node
        self._submitted: list[str] = []  # the names of the sweep's jobs

    def launch(self, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Print the script, or submit the job unless the run is in the queue. Return the run's metrics if `wait`."""
        config = request.config
        directory = Path(request.destination.directory) if request.destination.directory else None
        if self.dry_run:
            directory = directory or Path(config.local_outputs) / config.name / "STAMP"
            print(self._script(config.name, directory, [(directory, request)])[0], end="")
            return {}
        check_sbatch()
        is_new = directory is None or create_directory(directory)
        directory = directory or new_directory(config.local_outputs, config.name)
        previous = last_job(directory)
        if previous and not query_ended([previous]):
            raise InputError(
                f"{directory} belongs to job {previous}, which is in the queue; `scancel {previous}` ends it"
            )
        try:
            text, note = self._script(config.name, directory, [(directory, request)])
            job = submit(text, directory)
        except InputError:
            if is_new:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        print(f"submitted job {job}\nrun directory: {directory}{note}", flush=True)
        return follow(job, directory, self.log_file(directory, job)) if self.wait else {}

    def submit_sweep(self, jobs: Sequence[Request], directory: Path) -> list[str]:
        """Print or submit the jobs as one job array. Return their names in the queue; [] if they are printed."""
        runs = [(Path(str(request.destination.directory)), request) for request in jobs]
        text, note = self._script(jobs[0].config.name, directory, runs)
        if self.dry_run:
            print(text, end="")
            return []
        check_sbatch()
        first_number = min(int(run.name.partition("-")[0]) for run, _ in runs)
        job = submit(text, directory, name=f"jobs-{first_number}.sh")
        print(f"submitted {len(runs)} jobs as job {job}\nsweep directory: {directory}{note}", flush=True)
        names = [f"{job}_{number}" for number in range(len(runs))] if len(runs) > 1 else [job]
        self._submitted += names
        return names

    @classmethod
    def find_ended(cls, names: Sequence[str]) -> set[str]:
        return query_ended(names)

    def max_jobs(self) -> int:
        """Return how many tasks an array may have; Slurm's default limit if scontrol does not respond."""
        output = ""
        with suppress(OSError, subprocess.TimeoutExpired):
            command = ("scontrol", "show", "config")
            output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
        found = re.search(r"\bMaxArraySize\s*=\s*(\d+)", output)
        return max(int(found[1]), 1) if found else 1001

    def wait_for_sweep(self) -> bool:
        """With launcher.wait, return when all jobs of the sweep have ended. Return True if the method waited."""
        left = self._submitted
        try:
            with interruptible():
                while self.wait and (left := sorted({*left} - query_ended(left))):
                    time.sleep(POLL_S)
        except (KeyboardInterrupt, Stopped):
            leave_queued(*dict.fromkeys(job.partition("_")[0] for job in left))
        return self.wait

    @classmethod
    def log_file(cls, directory: Path, name: str) -> Path:
        return directory / "slurm" / f"{name}.log"

    def _script(self, name: str, directory: Path, runs: Sequence[tuple[Path, Request]]) -> tuple[str, str]:
        """Return the script of the runs, and a note on the code that `directory` has from an earlier submission.

        Several runs are the tasks of a job array. Raises InputError if the code cannot be copied.
        """
        is_elastic = runs[0][1].config.elastic_every_steps is not None
        config_dirs, note, select_code = list(runs[0][1].command.config_dirs), "", ""
        if self.code == "frozen":
            frozen = freeze_code(directory, config_dirs, write=not self.dry_run)
            config_dirs = frozen.config_dirs
            select_code = script.FROZEN.format(code=shlex.quote(str(frozen.path)), hash=frozen.path.name)
            if frozen.since:
                note = f"\ncode: as of {frozen.since}; remove {frozen.path} to submit with the current code"
        arguments = []
        for path, request in runs:
            kept = [text for text in request.command.overrides if not text.lstrip("+").startswith("launcher.dry_run=")]
            arguments.append((path, [*(f"--config-dir={config_dir}" for config_dir in config_dirs), *kept]))
        parts = (
            "#!/bin/bash",
            *self._directives(name, directory, len(runs), is_elastic),
            "",
            script.TRAP,
            *_select_run(arguments),
            self._functions(),
            script.SETUP,
            *self._prepare(),
            select_code,
            script.ELASTIC if is_elastic else "",
            script.RUN.format(
                ports=len(PORTS),
                first_port=PORTS[0],
                on_loss=script.CONTINUE if is_elastic else "--kill-on-bad-exit=1",
                agent="elastic_agent" if is_elastic else "agent",
            ),
        )
        return "\n".join(parts), note

    def _directives(self, name: str, directory: Path, num_runs: int, is_elastic: bool) -> list[str]:
        options: dict[str, SbatchOption] = {
            "job-name": self.job_name or name,
            "chdir": str(Path.cwd()),
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": self.cpus_per_node or (None if self.exclusive else self.nproc_per_node),
            "gpus-per-node": self.gpus_per_node,
            "exclusive": self.exclusive,
            "partition": self.partition,
            "account": self.account,
            "time": self.time,
            "no-kill": is_elastic,  # the job continues if a node is lost, except that of the script
            **{key.replace("_", "-"): value for key, value in (self.sbatch or {}).items()},
            "output": str(directory / "slurm" / ("%A_%a.log" if num_runs > 1 else "%j.log")),
            "open-mode": "append",
            "requeue": True,
            "signal": f"B:USR1@{self.signal_s}",  # only to the script
        }
        if num_runs > 1:
            options["array"] = f"0-{num_runs - 1}" + (f"%{self.parallel_jobs}" if self.parallel_jobs else "")
        if self._submitted and self.parallel_jobs:
            # The limit applies to one array, so this array starts when the previous one has ended.
            options["dependency"] = f"afterany:{self._submitted[-1].partition('_')[0]}"
        given = {name: value for name, value in options.items() if value is not None and value is not False}
        return [
            f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}")
            for name, value in given.items()
        ]

    def _functions(self) -> str:
        of_code = ("RUNNER_CODE", "PYTHONPATH", "PYTHONSAFEPATH") if self.code == "frozen" else ()
        names = ("RUNNER_DIRECTORY", *(self.env or {}), *of_code)
        python = "python" if self.conda or self.venv or self.prefix else shlex.quote(sys.executable)
        command = [self.prefix or "", "env", *(f'{name}="${name}"' for name in names), script.VISIBLE, python]
        return script.FUNCTIONS.format(
            command=" ".join(command).strip(),
            nproc=self.nproc_per_node,
            join_s=self.join_timeout_s,
            restarts=self.max_restarts,
            # Ranks that have not saved by then are killed, and the job resumes from the last checkpoint.
            save_s=max(self.signal_s - 20, self.signal_s * 3 // 4),
        )

    def _prepare(self) -> list[str]:
        """Return the lines that set up the run's environment. If one of them fails, the job exits."""
        commands = [f"module load {shlex.quote(module)}" for module in self.modules]
        if self.conda:
            commands += ['eval "$(conda shell.bash hook)"', f"conda activate {shlex.quote(self.conda)}"]
        if self.venv:
            commands.append(f"source {_expanded(str(Path(self.venv).expanduser() / 'bin' / 'activate'))}")
        for name, value in (self.env or {}).items():
            commands.append(f"{name}={_expanded(str(value))} && export {name}")
        commands += self.setup
        # The check has a line of its own, because a command may end with a comment or a here-document.
        return [f"doing={shlex.quote(command)}\n{command}\n(($? == 0)) || exit 1\ndoing=" for command in commands]


def _expanded(text: str) -> str:
    """Return one word of bash in which the node's variables are expanded, such as $HOME and $SLURM_TMPDIR."""
    return '"' + re.sub(r'(["`\\])', r"\\\1", text) + '"'


def _select_run(runs: Sequence[tuple[Path, list[str]]]) -> list[str]:
    """Return the lines that set the directory and the arguments of a run."""
    selected = [
        [f"export RUNNER_DIRECTORY={shlex.quote(str(directory))}", f"overrides=({shlex.join(arguments)})"]
        for directory, arguments in runs
    ]
    if len(selected) == 1:
        return selected[0]
    cases = [line for number, lines in enumerate(selected) for line in (f"{number})", *lines, ";;")]
    return ['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac"]
