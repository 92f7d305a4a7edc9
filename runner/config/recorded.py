"""What a run directory records of its configuration, read as it is: nothing is composed."""

from pathlib import Path
from typing import Any

import yaml

from runner.config.renamed_targets import rename_targets
from runner.config.schema import KEYS, SECTIONS, Config
from runner.errors import InputError
from runner.runs.run_directory import CONFIG, OVERRIDES, read_result

_FOLDER = "--config-dir="
_CHOICES = ("task", "model", "data", "parallel")


def read_config(run: Path) -> Config:
    """The resolved configuration that the run had; what an older run does not know has its default.

    Raises InputError where there is no such run.
    """
    try:
        container: Any = rename_targets(yaml.safe_load((run / CONFIG).read_text()))
        values = {key: container[key] for key in KEYS if key in container}
    except (OSError, yaml.YAMLError, TypeError) as error:
        what = f"its {CONFIG} cannot be read ({error})" if run.is_dir() else "there is no such directory"
        raise InputError(f"{run} is no run directory: {what}; name one under outputs/") from None
    for key, section in SECTIONS.items():
        known = vars(section())
        values[key] = section(**{name: value for name, value in values.get(key, {}).items() if name in known})
    return Config(**values)


def read_choices(run: Path) -> dict[str, str]:
    """The options that it took, of the groups that its result names."""
    result = read_result(run) or {}
    return {group: str(result[group]) for group in _CHOICES if group in result}


def read_folders(run: Path) -> list[str]:
    """Its own folders, of --config-dir. Raises InputError where one is not there any more."""
    try:
        words = [str(word) for word in yaml.safe_load((run / OVERRIDES).read_text()) or []]
    except (OSError, yaml.YAMLError) as error:
        raise InputError(
            f"{run} is no run directory: its {OVERRIDES} cannot be read ({error}); name one under outputs/"
        ) from None
    folders = [word.removeprefix(_FOLDER) for word in words if word.startswith(_FOLDER)]
    for folder in folders:
        if not Path(folder).is_dir():
            raise InputError(f"run={run}: its --config-dir={folder} is not there any more; put it back")
    return folders
