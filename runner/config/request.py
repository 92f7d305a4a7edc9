"""The request to run a job, which travels from the command line to its ranks."""

from dataclasses import dataclass

from runner.config.schema import Config
from runner.records.run_directory import Command, Destination, Pruner


@dataclass(frozen=True)
class Request:
    """The request to run a job."""

    config: Config
    command: Command
    destination: Destination
    pruner: Pruner | None = None
    queued_overrides: tuple[str, ...] = ()  # of a queued job's processes, if they differ from those of the command
    code_of: str | None = None  # the run whose copy of the custom modules is imported; None for the current files
