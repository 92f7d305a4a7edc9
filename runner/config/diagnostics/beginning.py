"""Checks init_from and freeze: what is wrong with each value by itself, before there is a file or a model."""

from runner.config.diagnostics.optimizer_groups import wrong_pattern
from runner.config.diagnostics.type_hints import show
from runner.config.schema import Config, InitFrom

_FORM = "'[\"^module[.]->\"]'"


def check_beginning(config: Config) -> list[str]:
    """One line per wrong value."""
    given, default = config.init_from, InitFrom()
    messages = []
    if given.path is None:
        messages += [
            f"init_from.{key}={show(value)} has no effect without init_from.path; name a file, or leave it out"
            for key, value in vars(given).items()
            if value != getattr(default, key)
        ]
    elif not given.path:
        messages.append("init_from.path= must be the path of a file or a run directory, or null")
    for index, entry in enumerate(given.map):
        key = f"init_from.map.{index}={entry}"
        if entry.count("->") != 1:
            messages.append(f"{key} must be a PATTERN->REPLACEMENT; for example init_from.map={_FORM}")
        elif message := wrong_pattern(entry.partition("->")[0]):
            messages.append(f"{key}: what stands before -> {message}")
    for index, pattern in enumerate(config.freeze):
        if message := wrong_pattern(pattern):
            messages.append(f"freeze.{index}={pattern} {message}")
    return messages
