"""The jobs of a sweep: the combinations of the values in its overrides, and those that a resumed sweep has recorded."""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from runner.config.custom_dirs import searched_dirs
from runner.config.diagnostics.type_hints import show
from runner.config.resume import add_recorded
from runner.config.schema import Config
from runner.errors import InputError, did_you_mean
from runner.records.ledger import JobRecord
from runner.records.settings import dotted

MAX_LABEL_LENGTH = 64
UNCOMPARED_KEYS = ("resume", "run_id", "outputs", "remote")  # jobs that differ only in their location are the same job


@dataclass
class Composer:
    """Composes jobs, each only once."""

    master: DictConfig
    loader: ConfigLoader
    _loaded: dict[tuple[str, ...], DictConfig] = field(default_factory=dict)
    _composed: dict[tuple[str, ...], tuple[Config, dict[str, str]]] = field(default_factory=dict)

    def load(self, job: Sequence[str]) -> None:
        """Compose the job without checking its values. Raises InputError for an unknown key or option."""
        from runner.config.compose import explained

        overrides = complete_overrides(job)
        # Hydra's own overrides are explained too, because one of them may add a directory to the search path.
        with explained([*self.master.hydra.overrides.hydra, *overrides]):
            self._loaded[tuple(job)] = self.loader.load_sweep_config(self.master, overrides)

    def compose(self, job: Sequence[str]) -> tuple[Config, dict[str, str]]:
        """Return the checked configuration and the options of the groups. Raises InputError for an invalid value."""
        from runner.config.compose import checked

        if tuple(job) not in self._composed:
            if tuple(job) not in self._loaded:
                self.load(job)
            cfg = self._loaded.pop(tuple(job))
            self._composed[tuple(job)] = checked(cfg, complete_overrides(job)), dict(cfg.hydra.runtime.choices)
        return self._composed[tuple(job)]


def complete_overrides(job: Sequence[str]) -> list[str]:
    """Return the overrides with which a job is composed, including the recorded ones of the run that `run=` names."""
    # The custom directories that this run recorded apply to the whole sweep, and are on the search path.
    return add_recorded(list(job), searched_dirs(), multirun=False).overrides


def first_job(overrides: Sequence[str], loader: ConfigLoader) -> list[str]:
    """Return the overrides with the first value of each swept key, to compose before the jobs are known."""
    parser = OverridesParser.create(config_loader=loader)
    job = []
    for text in overrides:
        try:
            override = parser.parse_overrides([text])[0]
        except HydraException:
            job.append(text)  # the composition reports the syntax error
            continue
        if override.is_hydra_override() or not override.is_sweep_override():
            job.append(text)
        elif (value := first_value(override)) is not None:
            job.append(f"{override.get_key_element()}={value}")
    return job


def first_value(override: Override) -> Any:
    """Return the first value of a swept key; None if it has no value, as with range(0)."""
    value = override.value()
    return value.start if isinstance(value, IntervalSweep) else next(iter(override.sweep_string_iterator()), None)


def combine(overrides: Sequence[Override], zipped: Any) -> list[list[str]]:
    """Return the overrides of each job of a grid.

    zipped: a list of keys whose values change together, or a list of such lists. Raises InputError if keys cannot be
    zipped, or if a key has no values.
    """
    values = {override.get_key_element(): _values(override) for override in overrides}
    groups = _zipped_groups(zipped, values)
    axes: list[list[tuple[str, ...]]] = []  # of the grid: the overrides in a tuple are applied together
    for key in values:
        group = next((group for group in groups if key in group), [key])
        if key == min(group, key=list(values).index):  # a group has the position of its first key
            axes.append(list(zip(*(values[member] for member in group), strict=True)))
    jobs = [[text for texts in entry for text in texts] for entry in itertools.product(*axes)]
    if not jobs:
        empty = next(override for override in overrides if not values[override.get_key_element()])
        raise InputError(f"{empty.input_line} has no values, so that there is no job; add at least one value")
    return jobs


def _values(override: Override) -> list[str]:
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    if not override.is_discrete_sweep():
        raise InputError(f"{override.input_line}: a grid needs values; list them, or add hydra/sweeper=optuna")
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _zipped_groups(zipped: Any, values: dict[str, list[str]]) -> list[list[str]]:
    if isinstance(zipped, str):
        raise InputError(f"hydra.sweeper.zip={zipped} must be a list of keys, as [optimizer.lr,batch_size]")
    groups = [list(zipped)] if zipped and isinstance(zipped[0], str) else [list(group) for group in zipped or ()]
    names = [key for group in groups for key in group]
    for group in groups:
        option = f"hydra.sweeper.zip=[{','.join(map(str, group))}]"
        if len(group) < 2 or len(set(names)) < len(names):
            raise InputError(f"{option} must name at least two keys, each only once")
        if missing := [key for key in group if key not in values]:
            raise InputError(f"{option}: {missing[0]} has no values{did_you_mean(str(missing[0]), list(values))}")
        if len({len(values[key]) for key in group}) > 1:
            counts = ", ".join(f"{key} has {len(values[key])}" for key in group)
            raise InputError(f"{option} needs keys with equally many values, but {counts}")
    return groups


def number_jobs(
    jobs: Sequence[list[str]], recorded: Sequence[JobRecord], composer: Composer, sweep: Path
) -> list[JobRecord]:
    """Return the jobs whose configuration differs from that of every other and every recorded job, with new numbers.

    sweep: the directory of the sweep. Print how many jobs have the configuration of another one of `jobs`.
    """

    def identity(job: Sequence[str]) -> str:
        return json.dumps(identifying_values(composer.compose(job)[0]), sort_keys=True)

    known, distinct = {identity(job.overrides) for job in recorded}, dict[str, list[str]]()
    for job in jobs:
        distinct.setdefault(identity(job), job)
    if num_equal := len(jobs) - len(distinct):
        print(f"equal values: {num_equal} of {len(jobs)} jobs would repeat another one, and run only once", flush=True)
    added = [job for key, job in distinct.items() if key not in known]
    first = max((job.number for job in recorded), default=-1) + 1
    varying = varying_keys([*(job.overrides for job in recorded), *distinct.values()])
    return [new_job(number, job, varying, sweep) for number, job in enumerate(added, start=first)]


def new_job(number: int, overrides: list[str], varying: Sequence[str], sweep: Path) -> JobRecord:
    """Return a job of the sweep in the directory `sweep`; `varying` are the keys that name it."""
    label = make_label(number, overrides, varying)
    return JobRecord(number, label, overrides, sweep / label)


def check_shared(
    directory: Path, recorded: Sequence[JobRecord], shared: dict[str, Any], config: Config, swept: Sequence[str]
) -> None:
    """Raise InputError if a value that all recorded jobs share has changed, in a file or by an override.

    config: the configuration of one job of this command. swept: the keys that have several values in this command.
    These keys, and the keys that differ between the recorded jobs, may have new values.
    """
    now, varying = identifying_values(config), _prefixes([*varying_keys([job.overrides for job in recorded]), *swept])
    changed = [
        f"{key} ({show(before)}, now {show(now.get(key))})"
        for key, before in shared.items()
        if not f"{key}.".startswith(varying) and json.dumps(now.get(key)) != json.dumps(before)
    ]
    if changed:
        raise InputError(
            f"resume={directory}: values that its jobs share have changed: {', '.join(changed)}; restore them, or "
            "start a new sweep"
        )


def shared_values(configs: Sequence[Config], swept: Sequence[str]) -> dict[str, Any]:
    """Return the values, by dotted key, that all configurations have in common, except those of the swept keys."""
    first, *others = map(identifying_values, configs)
    return {
        key: value
        for key, value in first.items()
        if not f"{key}.".startswith(_prefixes(swept)) and all(key in other and other[key] == value for other in others)
    }


def _prefixes(keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{key.lstrip('+')}." for key in keys)


def identifying_values(config: Config) -> dict[str, Any]:
    """Return the values that identify a job, by dotted key."""
    return dotted({key: value for key, value in asdict(config).items() if key not in UNCOMPARED_KEYS})


def varying_keys(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return the keys of the overrides that differ between the jobs."""
    values = [dict(override.partition("=")[::2] for override in job) for job in jobs]
    keys = dict.fromkeys(key for of_job in values for key in of_job)
    return [key for key in keys if len({of_job.get(key) for of_job in values}) > 1]


def make_label(number: int, job: Sequence[str], varying: Sequence[str]) -> str:
    """Return the name of the job's directory: its number, and the keys and values that distinguish it."""
    values = dict(override.partition("=")[::2] for override in job)
    text = "_".join(f"{key.lstrip('+~').split('.')[-1]}-{_short(values[key])}" for key in varying if key in values)
    return f"{number}-{re.sub(r'[^A-Za-z0-9._-]+', '.', text)}"[:MAX_LABEL_LENGTH].rstrip("-._")


def _short(value: str) -> str:
    """Return the value without quotes; a long number, as a sampler draws it, is rounded to four digits."""
    if value[:1] in ("'", '"'):
        return value[1:-1]
    return f"{float(value):.4g}" if re.fullmatch(r"-?\d+\.\d{6,}(e[-+]?\d+)?", value) else value
