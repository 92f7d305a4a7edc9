"""The splits of the data, downloaded once per machine if they are missing."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset

from runner.config.diagnostics.signature import accepts, literals, split_option
from runner.config.instantiate import make_group
from runner.config.schema import SPLITS, Config
from runner.distributed.machine import available_memory
from runner.distributed.world import World
from runner.errors import InputError, failed_with
from runner.input.augmentation import augment
from runner.input.rng import make_generator
from runner.input.sample_cache import CannotCache
from runner.input.source import Source

T = TypeVar("T")
_SPLIT_KEY = 2**63  # of the stream that draws the validation samples; no epoch has this number


class Unsuitable(InputError):
    """The dataset does not support the options, whether its files exist or not."""


class NoSplit(Unsuitable):
    """The dataset has no split of that name."""


def load_data(config: Config, choices: Mapping[str, str], world: World) -> tuple[Source, Source]:
    """Return the training data and the evaluated data (config.split). All ranks must call it.

    If files are missing, one process per machine downloads them first. Raise InputError if the dataset lacks a split,
    indexing, length or samples, or if its samples cannot be kept in memory.
    """

    def load(options: Mapping[str, Any]) -> tuple[Source, Source]:
        splits = _Splits(config, choices, options)
        train = splits.load("train")
        return train, train if config.split == "train" else splits.load(config.split)

    train, evaluated = _downloaded(config, world, load)
    if config.keep_samples:
        _keep_samples(train, evaluated)
    return augment(config, train), evaluated


def load_split(config: Config, choices: Mapping[str, str], world: World, split: str) -> Source:
    """Return one split: train, val or test. See `load_data`."""
    return _downloaded(config, world, lambda options: _Splits(config, choices, options).load(split))


def _keep_samples(train: Source, evaluated: Source) -> None:
    """Read each sample of both once per machine."""
    try:
        for source in dict.fromkeys((train, evaluated)):
            source.cache_samples()
    except CannotCache as error:
        raise InputError(str(error)) from None
    except Exception as error:  # of the dataset
        raise InputError(f"data: its first sample cannot be read{failed_with(error)}") from None
    caches = dict.fromkeys(source.cache for source in (train, evaluated))
    needed, left = sum(cache.num_bytes for cache in caches if cache is not None), available_memory()
    if needed > left:
        raise InputError(
            f"keep_samples=true: the samples need {needed / 2**30:,.1f} GiB, but this machine has {left / 2**30:,.1f} "
            "GiB of memory left; leave it out"
        )


def _downloaded(config: Config, world: World, load: Callable[[Mapping[str, Any]], T]) -> T:
    """Load the data, and download them before if they are missing on any rank."""
    if not config.data.get("download"):
        return load({})
    loaded: list[T] = []
    missing: list[str] = []
    try:
        loaded.append(load({"download": False}))
    except Unsuitable:
        raise
    except InputError as error:
        missing = error.messages
    if not world.consensus.first_error("missing data", missing):
        return loaded[0]
    failures: list[str] = []

    def download() -> None:
        try:
            loaded[:] = [load({"download": True})]
        except InputError as error:
            failures.extend(error.messages)

    world.consensus.run_in_order("download", download)
    if failures := world.consensus.first_error("download", failures):
        raise InputError(*failures)
    return loaded[0]


class _Splits:
    """The splits that the dataset has itself, and a validation split that is drawn from its training split."""

    def __init__(self, config: Config, choices: Mapping[str, str], options: Mapping[str, Any]):
        target = config.data["_target_"]
        shapes = ("sample_shape", "num_outputs")  # models refer to these keys; a dataset may accept them too
        node = {key: value for key, value in config.data.items() if key not in shapes or accepts(target, key)}
        self._node, self._choices = {**node, **options}, choices
        self._data = f"data={choices.get('data', target)}"
        self._option = split_option(target)
        self._names = {
            "train": ("train", "val"),
            "split": literals(target, "split") or SPLITS,
            None: ("train",),
        }[self._option]
        self._fraction, self._seed = config.val_fraction, config.seed
        self._whole: Source | None = None  # the dataset's training split, including validation samples

    def load(self, split: str) -> Source:
        if split == "test" or (split == "train" and self._fraction is None):
            return self._existing(split)
        if self._fraction is not None:
            return self._drawn(split, self._fraction)
        try:
            return self._existing(split)
        except NoSplit as error:
            reason = f" ({error})" if str(error) else ""
            raise Unsuitable(
                f"{self._data} has no validation split{reason}; set val_fraction=0.1 to take it from the training split"
            ) from None

    def _existing(self, split: str) -> Source:
        """Return a split that the dataset has itself. Raise NoSplit if it does not have one of that name."""
        if split not in self._names:
            if split == "val":
                raise NoSplit("")
            raise NoSplit(f"split={split}: {self._data} has no such split; it has {' and '.join(self._names)}")
        options: Any = {"train": {"train": split == "train"}, "split": {"split": split}, "": {}}[self._option or ""]
        try:
            dataset = make_group(self._choices, "data", self._node, **options)
        except InputError as error:
            if self._option == "split" and split != "train" and re.search(r"\bsplit\b", str(error)):
                raise NoSplit(*(message.removeprefix(f"{self._data}: ") for message in error.messages)) from None
            raise
        except KeyError as error:
            if error.args != (split,):
                raise
            raise NoSplit(f"split={split}: {self._data} has no such split" if split != "val" else "") from None
        self._check(dataset, split)
        return Source.of(dataset)

    def _drawn(self, split: str, fraction: float) -> Source:
        """Return validation samples drawn by the seed from the training split, or the other samples."""
        if self._whole is None:
            if self._has_validation():
                raise Unsuitable(
                    f"val_fraction={fraction} has no effect, because {self._data} has a validation split; leave it out"
                )
            self._whole = self._existing("train")
        num_samples = len(self._whole)
        num_val = round(num_samples * fraction)
        if not 0 < num_val < num_samples:
            smallest = max(0.1, 1 / num_samples)
            raise Unsuitable(
                f"val_fraction={fraction} of the {num_samples} samples of {self._data} are {num_val}, but both splits "
                f"need one; {f'try val_fraction={smallest:.2g}' if num_samples > 1 else 'use more samples'}"
            )
        order = torch.randperm(num_samples, generator=make_generator(self._seed, _SPLIT_KEY))
        rows = order[:num_val] if split == "val" else order[num_val:]
        return replace(self._whole, rows=rows.sort().values)  # sorted, so that files are read sequentially

    def _has_validation(self) -> bool:
        if self._option != "split" or "val" not in self._names:
            return "val" in self._names
        try:
            self._existing("val")
        except NoSplit:
            return False
        return True

    def _check(self, dataset: Any, split: str) -> None:
        if isinstance(dataset, IterableDataset):
            raise InputError(
                f"{self._data}: an IterableDataset has no length or index, which are needed to select the samples of a "
                "step; use a map-style dataset, with __len__ and __getitem__"
            )
        if missing := [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]:
            raise InputError(f"{self._data}: {type(dataset).__name__} lacks {' and '.join(missing)}; add it")
        if len(dataset) == 0:
            raise InputError(f"{self._data}: its {split} split has no samples; at least one is required")
