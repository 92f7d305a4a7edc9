"""A sweep: its jobs checked, its directory, each job's run, the table at its end."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict
from rich.console import Console
from rich.table import Table

from runner.backend import as_backend
from runner.config import InputError
from runner.explain.diagnose import explain, three_lines
from runner.going_on import Typed, go_on
from runner.launchers.env import Place
from runner.run_dir import Request, new_directory

LABEL_LENGTH = 64
_current: list["Sweep"] = []


@dataclass
class Sweep:
    """The task that Hydra's launchers run for each job; they may pickle it."""

    place: Place
    config_dir: str | None
    command: tuple[str, ...]
    directory: str = ""
    varying: list[str] = field(default_factory=list)  # the keys that differ between jobs
    jobs: list[list[str]] = field(default_factory=list)
    results: Sequence[JobReturn] = ()

    def open(self, jobs: list[list[str]], master: DictConfig, loader: ConfigLoader) -> list[list[str]]:
        """Compose and check every job, then make the sweep's directory. Returns the jobs as they are to be composed.

        Raises InputError, with nothing written, when a job has a value that is wrong by itself. Values that only do
        not fit together are that job's own failure. All ranks must call it.
        """
        from runner.entry import checked

        self.jobs = jobs
        words = [dict(word.split("=", 1) for word in job) for job in jobs]
        self.varying = [key for key in words[0] if len({word[key] for word in words}) > 1]
        composed, messages = [], []
        config = None
        for job in jobs:
            overrides = go_on(job, None, multirun=False).overrides
            try:
                config = checked(loader.load_sweep_config(master, overrides), overrides)
            except InputError as error:
                messages += [message for message in error.messages if message not in messages]
            except Exception as error:
                messages += [line for line in explain(error, overrides, loader) if line not in messages]
            composed.append(overrides)
        if messages:
            raise InputError(*messages)
        assert config is not None
        self.directory = self._make_directory(config.outputs, config.name, config.backend)
        with open_dict(master):  # the launcher makes these two, and nothing else, in its name
            master.hydra.overrides.hydra += [f"hydra.sweep.dir='{self.directory}'", "hydra.sweep.subdir=."]
            master.hydra.sweep.dir = self.directory
        return composed

    def __call__(self, cfg: DictConfig) -> dict[str, float]:
        """Run one job on this rank. Returns its metrics."""
        from runner.entry import checked
        from runner.job import JobFailed
        from runner.launch import launch
        from runner.train import Preempted

        owner = HydraConfig.get()
        number, typed = int(owner.job.num), list(owner.overrides.task)
        label = self.label(number)
        if self.place.rank == 0:
            print(f"\njob {number + 1} of {len(self.jobs)}: {label}", flush=True)
        request = Request(
            overrides=tuple(typed),
            config_dir=self.config_dir,
            command=self.command,
            directory=str(Path(self.directory) / label),
            choices=dict(owner.runtime.choices),
        )
        try:
            return launch(checked(cfg, typed), request, self.place)
        except InputError as error:
            if self.place.rank == 0:
                print(*three_lines(error.messages), sep="\n", file=sys.stderr, flush=True)
            raise
        except Preempted:
            raise SystemExit(143) from None  # unlike an Exception it ends the sweep, and not the job alone
        except JobFailed:
            raise

    def label(self, number: int) -> str:
        """The directory of a job: its number and what makes it different."""
        words = dict(word.split("=", 1) for word in self.jobs[number])
        text = "_".join(f"{key.lstrip('+~').split('.')[-1]}-{words[key]}" for key in self.varying)
        return f"{number}-{re.sub(r'[^A-Za-z0-9._-]+', '.', text)}"[:LABEL_LENGTH].rstrip("-._")

    def table(self) -> str:
        """What became of each job, a line each."""
        table = Table("job", "state", "val/accuracy", "val/loss", "why", box=None, pad_edge=False)
        for number, result in enumerate(self.results):
            metrics, why = {}, ""
            if result.status == JobStatus.COMPLETED:
                metrics, state = result.return_value, "finished"
            else:
                error: Any = result._return_value  # `return_value` would raise it
                state = "refused" if isinstance(error, InputError) else "failed"
                why = str(error).strip().splitlines()[-1 if state == "failed" else 0]
            numbers = [f"{metrics[key]:.4f}" if key in metrics else "" for key in ("val/accuracy", "val/loss")]
            table.add_row(self.label(number), state, *numbers, why)
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200)
        with console.capture() as captured:
            console.print(table)
        return captured.get()

    def _make_directory(self, outputs: str, name: str, backend: dict[str, Any]) -> str:
        def make() -> str:
            path = new_directory(outputs, name, prefix="sweep-")
            jobs = [{"number": n, "label": self.label(n), "overrides": job} for n, job in enumerate(self.jobs)]
            (path / "sweep.json").write_text(json.dumps({"command": self.command, "jobs": jobs}, indent=1) + "\n")
            return str(path)

        if self.place.world_size == 1:
            return make()
        from runner.meeting import join

        world = join(self.place, as_backend(backend))
        world.agree("composed", [])
        return world.share("sweep", make)


def current() -> Sweep:
    """The sweep that this process runs; Hydra hands its task to the launcher alone, and the sweeper needs it too."""
    return _current[-1]


def run_sweep(typed: Typed, place: Place) -> int:
    """Run the sweep that was typed. Returns the exit status. Raises InputError with nothing written."""
    from runner.entry import compose

    base = compose(typed.overrides, RunMode.MULTIRUN)
    sweep = Sweep(place, typed.config_dir, tuple(sys.orig_argv))
    _current.append(sweep)
    owner = GlobalHydra.instance().hydra
    assert owner is not None
    try:
        owner.multirun("config", sweep, typed.overrides, with_log_configuration=False)
    finally:
        _current.pop()
    failed = [result for result in sweep.results if result.status != JobStatus.COMPLETED]

    def say() -> None:
        print(f"\n{sweep.table()}", flush=True)
        done, all_jobs = len(sweep.results) - len(failed), len(sweep.results)
        print(f"{done} of {all_jobs} jobs finished: {sweep.directory}", flush=True)

    if place.world_size == 1:
        say()
    else:
        from runner.meeting import join

        world = join(place, as_backend(dict(base.backend)))
        world.speak(say)
        world.close()
    return 1 if failed else 0
