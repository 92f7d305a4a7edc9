"""task=report: what sweeps and runs have shown, as a table, Markdown, CSV and pictures."""

from pathlib import Path

from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.rendezvous import join
from runner.errors import InputError
from runner.runs.records import RunRecord, read_jobs
from runner.runs.report.plots import draw
from runner.runs.report.render import as_csv, as_markdown, as_text
from runner.runs.report.statistics import Summary, summarize
from runner.runs.run_directory import Request, new_directory
from runner.sweeps.queue_state import read_standing


class Report:
    """Reads config.run and config.report.runs, and writes beside what it has read."""

    reads_run = True
    reads_checkpoint = False
    needs_experiment = False
    trains = False
    picks_split = False
    section = "report"

    def launch_jobs(self, config: Config, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Print and keep the report. Returns the best mean. All ranks must call it.

        Raises InputError for what is no sweep or run, and for a metric that none has.
        """
        named = [("run", config.run)] if config.run else []
        named += [("report.runs", path) for path in config.report.runs]
        left_out: list[str] = []
        jobs = [job for key, path in named for job in read_jobs(Path(path).absolute(), key, read_standing, left_out)]
        if left_out and not jobs:
            raise InputError(*left_out)
        summary = summarize(_once(jobs), config.report.metric, config.report.direction)
        world = join(rank_info, as_backend(config.backend))
        world.begin_job(as_backend(config.backend))
        try:
            world.agreement.share("report", lambda: _tell(summary, config, [Path(path) for _, path in named], left_out))
        except ValueError as error:
            raise InputError(f"report.output: the report cannot be kept ({error}); name a folder for it") from None
        best = summary.best
        return {summary.metric: best.means[summary.metric].value} if best and summary.metric else {}


def _tell(summary: Summary, config: Config, named: list[Path], left_out: list[str]) -> str:
    if config.report.output:
        folder = Path(config.report.output).absolute()
        folder.mkdir(parents=True, exist_ok=True)
    elif len(named) == 1:
        folder = named[0].absolute()
    else:
        folder = new_directory(config.outputs, config.name, prefix="report-")
    print(as_text(summary), *left_out, sep="\n", flush=True)
    title = named[0].name if len(named) == 1 else f"{len(summary.jobs)} runs"
    pictures = draw(summary, folder)
    (folder / "report.md").write_text(as_markdown(summary, title, pictures))
    (folder / "report.csv").write_text(as_csv(summary))
    print(f"\nreport: {folder / 'report.md'}, report.csv, {', '.join(pictures)}".rstrip(", "), flush=True)
    return str(folder)


def _once(jobs: list[RunRecord]) -> list[RunRecord]:
    """A job that is named by itself and in its sweep counts once."""
    return list({job.directory: job for job in jobs}.values())
