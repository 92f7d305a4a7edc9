"""What a run directory records of its configuration, read as it is: nothing is composed."""

from pathlib import Path
from typing import Any

from runner.config.renamed_targets import rename_keys, rename_targets
from runner.config.schema import KEYS, SECTIONS, Config
from runner.config.strangers import check_targets, check_words
from runner.errors import InputError
from runner.runs.run_directory import CONFIG, OVERRIDES, read_result
from runner.runs.shapes import read_mapping, read_words

_FOLDER = "--config-dir="
_CHOICES = ("task", "model", "data", "parallel")


def read_config(run: Path) -> Config:
    """The resolved configuration that the run had; what an older run does not know has its default.

    Raises InputError where there is no such run, or the file is not what a run records.
    """
    if not (run / CONFIG).is_file():
        what = f"it has no {CONFIG}" if run.is_dir() else "there is no such directory"
        raise InputError(f"{run} is no run directory: {what}; name one under outputs/")
    container: Any = rename_targets(read_mapping(run / CONFIG))
    values = {key: container[key] for key in KEYS if key in container}
    if odd := [key for key in SECTIONS if not isinstance(values.get(key, {}), dict)]:
        raise InputError(f"{run / CONFIG}: {odd[0]} is no mapping, and so not what a run has recorded; put it back")
    for key, section in SECTIONS.items():
        known = vars(section())
        values[key] = section(**{name: value for name, value in values.get(key, {}).items() if name in known})
    return Config(**values)


def read_choices(run: Path) -> dict[str, str]:
    """The options that it took, of the groups that its result names."""
    result = read_result(run) or {}
    return {group: str(result[group]) for group in _CHOICES if group in result}


def read_overrides(run: Path, typed: str, trust: Any = None) -> tuple[list[str], list[str]]:
    """What was typed for the run: its words, with the keys as they are called today, and its own folders.

    typed: what names the run, as run=DIR. trust: as typed; None where nothing was. Raises InputError where the file is
    not what a run records, and where it names code in another user's directory that is not trusted.
    """
    recorded = read_words(run / OVERRIDES)
    folders = [word.removeprefix(_FOLDER) for word in recorded if word.startswith(_FOLDER)]
    words = rename_keys([word for word in recorded if not word.startswith("--")])
    check_words(typed, run, words, folders, trust)
    return words, folders


def read_for_model(run: Path, trust: bool) -> tuple[Config, list[str]]:
    """The configuration and the own folders of a run whose model is to be made.

    Raises InputError as read_config and read_overrides do, and where one of the folders is not there any more.
    """
    config = read_config(run)
    _, folders = read_overrides(run, f"run={run}", trust)
    check_targets(run, config, trust)
    for folder in folders:
        if not Path(folder).is_dir():
            raise InputError(f"run={run}: its --config-dir={folder} is not there any more; put it back")
    return config, folders
