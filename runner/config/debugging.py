"""debug=true: a run that is small enough to be followed, in the process that has the terminal."""

from dataclasses import replace

from runner.config.schema import Config

BATCHES = 3  # of an epoch's training and of an evaluation, those that it begins with otherwise too


def for_debugging(config: Config) -> Config:
    """The configuration with what debug=true stands for; as it was where that is not chosen."""
    if not config.debug:
        return config
    loader = {**config.loader, "num_workers": 0, "prefetch": None}  # a debugger has no terminal in a worker
    return replace(config, loader=loader, eval_batches=min(config.eval_batches or BATCHES, BATCHES))


def check_alone(config: Config, world_size: int) -> list[str]:
    """Why the world is not one to be debugged, one message."""
    if not config.debug or world_size == 1:
        return []
    return [f"debug=true is for one process, but the world has {world_size}; start it by `python -m runner debug=true`"]
