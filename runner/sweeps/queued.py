"""The jobs of a sweep that a queue is to run: what is checked before the first one is handed over."""

from collections.abc import Mapping, Sequence

from runner.config import Config, InputError
from runner.launchers.env import Place


def check_launchers(configs: Sequence[Config], choices: Sequence[Mapping[str, str]], place: Place, asks: bool) -> None:
    """Raises InputError where a sweep cannot start its jobs so, and where one would wait in a queue only to be refused.

    choices: the options that each job takes of its groups. asks: the sweeper needs each result before the next job.
    """
    from runner.ahead import check_ahead
    from runner.build import make_launcher

    launchers = [make_launcher(config) for config in configs]
    jobs = zip(configs, choices, launchers, strict=True)
    queued = [(config, own, launcher) for config, own, launcher in jobs if launcher.queues]
    if asks and queued:
        raise InputError(
            "launcher=slurm queues jobs, and hydra/sweeper=optuna needs the result of each before it asks for the "
            "next; start the sweep inside a job, with launcher=env"
        )
    if any(launcher.started_on_each for launcher in launchers):
        raise InputError(
            "launcher.nodes: each machine would make a sweep of its own; start the sweep by torchrun on all of "
            "them (torchrun --nnodes ... -m runner -m ...), or with launcher=slurm"
        )
    if queued and not place.may_start_processes:
        raise InputError(
            f"launcher={queued[0][1]['launcher']} queues jobs, but {place.found} has started this process as rank "
            f"{place.rank} of {place.world_size}, and each rank would; leave one of the two out"
        )
    messages: list[str] = []
    for config, own, launcher in queued:
        try:
            if launcher.world_size is not None:
                check_ahead(config, own, launcher.world_size)
        except InputError as error:
            messages += [message for message in error.messages if message not in messages]
    if messages:
        raise InputError(*messages)
