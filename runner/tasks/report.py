"""task=report: the results of sweeps and runs as a table, Markdown, CSV and plots."""

from pathlib import Path

from runner.config.request import Request
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.rendezvous import join
from runner.errors import InputError
from runner.jobs.task import LaunchingTask
from runner.records.compared_runs import DAMAGED, read_jobs
from runner.records.report.plots import draw
from runner.records.report.render import as_csv, as_markdown, as_text
from runner.records.report.statistics import Summary, summarize
from runner.records.run_directory import new_directory
from runner.records.run_files import write_atomically
from runner.sweeps.queues import read_jobs_and_queues


class Report(LaunchingTask):
    """Reports on config.run and report.runs. Writes to report.output, the directory that is read, or a new one."""

    section = "report"
    reads_run = True

    def launch_jobs(self, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Print and write the report, and return the best mean. All ranks must call it."""
        config, options = request.config, request.config.report
        named = [("run", config.run)] if config.run else []
        named += [("report.runs", path) for path in options.runs]
        jobs = [
            job
            for key, path in named
            for job in read_jobs(Path(path).absolute(), key, read_jobs_and_queues, options.value)
        ]
        if not jobs:
            raise InputError(f"{named[0][0]}={named[0][1]}: its ledger has no jobs; name another sweep or run")
        if all(job.state == DAMAGED for job in jobs):
            raise InputError(*(str(job.error) for job in jobs))
        unique = list({job.directory: job for job in jobs}.values())  # a job may be named in addition to its sweep
        summary = summarize(unique, options.metric, options.direction, options.over)
        world = join(rank_info, as_backend(config.backend))
        world.begin_job(as_backend(config.backend))
        paths = [Path(path) for _, path in named]

        def write() -> str:
            if options.output:
                directory = Path(options.output).absolute()
            elif len(paths) == 1:
                directory = paths[0].absolute()
            else:
                directory = new_directory(config.local_outputs, config.name, prefix="report-")
            return _write(summary, paths, directory)

        try:
            written = world.consensus.broadcast("report", write)
        except ValueError as error:
            raise InputError(f"report.output: the report cannot be written ({error}); name another directory") from None
        if rank_info.rank == 0:  # the files exist already if a reader such as `head` closes the pipe
            print(as_text(summary), f"\nreport: {written}", sep="\n", flush=True)
        best = summary.best
        return {summary.metric: best.means[summary.metric].value} if best and summary.metric else {}


def _write(summary: Summary, paths: list[Path], directory: Path) -> str:
    """Write the files, and return their paths as one line. paths: what was read."""
    directory.mkdir(parents=True, exist_ok=True)
    title = paths[0].name if len(paths) == 1 else f"{len(summary.jobs)} runs"
    plots = draw(summary, directory)
    write_atomically(directory / "report.md", as_markdown(summary, title, plots))
    write_atomically(directory / "report.csv", as_csv(summary))
    return ", ".join([str(directory / "report.md"), "report.csv", *plots])
