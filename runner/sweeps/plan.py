"""Which jobs a sweep has: those that are typed, and those that it had before it is resumed."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from runner.config.diagnostics.overrides import explain
from runner.config.diagnostics.type_hints import show
from runner.config.own_folders import searched
from runner.config.renamed_targets import rename_shared
from runner.config.resume import put_on_top, with_recorded
from runner.config.schema import Config
from runner.errors import InputError
from runner.runs.ledger import JobRecord
from runner.runs.records import dotted

LABEL_LENGTH = 64
NOT_THE_JOBS = ("resume", "outputs")  # keys that say where jobs are, and not what they are


@dataclass(frozen=True)
class Job:
    """One job of a sweep."""

    number: int
    label: str  # the name of its directory
    overrides: list[str]


@dataclass
class Composer:
    """Composes jobs, each once."""

    master: DictConfig
    loader: ConfigLoader
    choices: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)  # of a job's groups, once composed
    _composed: dict[tuple[str, ...], Config] = field(default_factory=dict)

    def compose(self, job: Sequence[str]) -> Config:
        """The checked configuration. Raises InputError when the job has a value that is wrong by itself."""
        from runner.config.compose import checked

        if tuple(job) not in self._composed:
            overrides = composed_words(job)
            try:
                cfg = self.loader.load_sweep_config(self.master, overrides)
                self.choices[tuple(job)] = dict(cfg.hydra.runtime.choices)
                self._composed[tuple(job)] = checked(cfg, overrides)
            except InputError:
                raise
            except Exception as error:
                # With Hydra's own words: one of them names the user's folder.
                raise InputError(
                    *explain(error, [*self.master.hydra.overrides.hydra, *overrides], self.loader)
                ) from None
        return self._composed[tuple(job)]

    def compose_all(self, jobs: Sequence[Sequence[str]]) -> list[Config]:
        """Raises InputError with what is wrong with any of them, each message once."""
        configs, messages = [], []
        for job in jobs:
            try:
                configs.append(self.compose(job))
            except InputError as error:
                messages += [message for message in error.messages if message not in messages]
        if messages:
            raise InputError(*messages)
        return configs


def composed_words(job: Sequence[str]) -> list[str]:
    """What is composed for the job: with what an earlier run recorded, where it names one."""
    # What the run recorded of folders was asked for the whole sweep, and is searched.
    return with_recorded(list(job), searched(), multirun=False).overrides


def first_job(typed: Sequence[str], loader: ConfigLoader) -> list[str]:
    """The words with the first value of each that has several, so that they compose before the jobs are known."""
    parser = OverridesParser.create(config_loader=loader)
    words = []
    for word in typed:
        try:
            override = parser.parse_overrides([word])[0]
        except HydraException:
            words.append(word)  # composing says what is wrong with its grammar
            continue
        if override.is_hydra_override() or not override.is_sweep_override():
            words.append(word)
        elif (value := first_value(override)) is not None:
            words.append(f"{override.get_key_element()}={value}")
    return words


def first_value(override: Override) -> Any:
    """Of a key that is typed with several; None where there is none, as in range(0)."""
    value = override.value()
    return value.start if isinstance(value, IntervalSweep) else next(iter(override.sweep_string_iterator()), None)


def number_jobs(jobs: Sequence[list[str]], recorded: Sequence[JobRecord], composer: Composer) -> list[Job]:
    """The jobs that are not among the recorded ones, which have the same configuration, with numbers of their own."""
    known = {_identity(composer.compose(job.overrides)) for job in recorded}
    added = [job for job in jobs if _identity(composer.compose(job)) not in known] if known else list(jobs)
    first = max((job.number for job in recorded), default=-1) + 1
    varying = varying_keys([*(job.overrides for job in recorded), *jobs])
    return [Job(number, make_label(number, job, varying), job) for number, job in enumerate(added, start=first)]


def check_shared(
    directory: Path,
    recorded: Sequence[JobRecord],
    shared: dict[str, Any],
    job: Sequence[str],
    swept: Sequence[str],
    composer: Composer,
) -> None:
    """Raises InputError when what the recorded jobs share is another now: in the files, or by what is typed on top.

    job: one that is typed now. swept: the keys that are typed with several values. These, and those that differ between
    the recorded jobs, may have more values than they had.
    """
    varying = {*varying_keys([job.overrides for job in recorded]), *swept}
    fixed = [word for word in job if _key(word) not in varying]
    changed: dict[str, str] = {}
    for each in recorded:
        same = set(fixed) <= set(each.overrides)
        now = flatten(composer.compose(each.overrides if same else put_on_top(each.overrides, fixed)))
        for key, before in rename_shared(shared).items():
            if key not in now or json.dumps(now[key]) != json.dumps(before):
                values = show(before), show(now[key]) if key in now else "gone"
                if key.endswith("._target_"):
                    values = values[0].rpartition(".")[2], values[1].rpartition(".")[2]
                changed[key] = f"{key.removesuffix('._target_')} ({values[0]}, now {values[1]})"
    chosen = {key.removesuffix("._target_") for key in changed if key.endswith("._target_")}
    told = [text for key, text in changed.items() if key.endswith("._target_") or key.split(".")[0] not in chosen]
    if told:
        raise InputError(
            f"resume={directory}: what its jobs share has changed: {', '.join(told)}; undo that, or start a new sweep"
        )


def shared_values(configs: Sequence[Config], swept: Sequence[str]) -> dict[str, Any]:
    """The values, by dotted key, that all the configurations have; none of a key that is swept over."""
    first, *others = map(flatten, configs)
    own = tuple(f"{key.lstrip('+')}." for key in swept)
    return {
        key: value
        for key, value in first.items()
        if not f"{key}.".startswith(own) and all(key in other and other[key] == value for other in others)
    }


def flatten(config: Config) -> dict[str, Any]:
    """What the configuration says of the job itself, by dotted key."""
    return dotted({key: value for key, value in asdict(config).items() if key not in NOT_THE_JOBS})


def varying_keys(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The keys that differ between jobs, as typed."""
    words = [dict(word.partition("=")[::2] for word in job) for job in jobs]
    keys = dict.fromkeys(key for of_job in words for key in of_job)
    return [key for key in keys if len({of_job.get(key) for of_job in words}) > 1]


def make_label(number: int, job: Sequence[str], varying: Sequence[str]) -> str:
    """The directory of a job: its number and what makes it different."""
    words = dict(word.partition("=")[::2] for word in job)
    text = "_".join(f"{key.lstrip('+~').split('.')[-1]}-{_short(words[key])}" for key in varying if key in words)
    return f"{number}-{re.sub(r'[^A-Za-z0-9._-]+', '.', text)}"[:LABEL_LENGTH].rstrip("-._")


def _identity(config: Config) -> str:
    return json.dumps(flatten(config), sort_keys=True)


def _short(value: str) -> str:
    """A number that nobody typed has more digits than a name needs."""
    return f"{float(value):.4g}" if re.fullmatch(r"-?\d+\.\d{6,}(e[-+]?\d+)?", value) else value


def _key(word: str) -> str:
    return word.partition("=")[0]
