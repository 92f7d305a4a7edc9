"""The splits of the data, fetched once per node where they are not there yet."""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset

from runner.config.diagnostics.own_line import failed_with
from runner.config.diagnostics.signature import accepts, literals, split_option
from runner.config.instantiate import make_group
from runner.config.schema import SPLITS, Config
from runner.distributed.memory_left import memory_left
from runner.distributed.world import World
from runner.errors import InputError
from runner.training.augmentation import augment
from runner.training.kept_samples import CannotKeep, KeptSamples
from runner.training.part import Part
from runner.training.sample_lists import as_batches
from runner.training.sampler import generator

T = TypeVar("T")
_CUT = 2**63  # keys the stream that draws the validation samples; no epoch has this number


class Unfit(InputError):
    """What was asked for is not to be had of the data set, whether its files are there or not."""


class NoSplit(Unfit):
    """The data set has no split of that name."""


def load_data(config: Config, choices: Mapping[str, str], world: World) -> tuple[Any, Any]:
    """The training data, and what is evaluated: config.split. Where files are missing, one process per node fetches
    them first. All ranks must call it.

    Raises InputError for a split that the data set does not have, for one without index, length or samples, and for
    samples that cannot be kept.
    """

    def load(options: Mapping[str, Any]) -> tuple[Any, Any]:
        splits = _Splits(config, choices, options)
        train = splits.load("train")
        return train, train if config.split == "train" else splits.load(config.split)

    train, evaluated = _fetched(config, world, load)
    if config.keep_samples:
        train, evaluated = _kept(train, evaluated)
    return augment(config, train), evaluated


def load_split(config: Config, choices: Mapping[str, str], world: World, split: str) -> Any:
    """One split by its name: train, val or test. As load_data."""
    return _fetched(config, world, lambda options: _Splits(config, choices, options).load(split))


def _kept(train: Any, evaluated: Any) -> tuple[Any, Any]:
    """Both, so that their samples are read once on each machine."""
    try:
        kept = KeptSamples(train)
        both = kept, kept if evaluated is train else KeptSamples(evaluated)
    except CannotKeep as error:
        raise InputError(str(error)) from None
    except Exception as error:  # reading runs the user's code, which can fail in any way
        raise InputError(f"data: its first sample cannot be read{failed_with(error)}") from None
    needed, left = sum({id(each): each.num_bytes for each in both}.values()), memory_left()
    if needed > left:
        raise InputError(
            f"keep_samples=true: the samples take {needed / 2**30:,.1f} GiB, and this machine has {left / 2**30:,.1f} "
            "GiB of memory left; leave it out"
        )
    return both


def _fetched(config: Config, world: World, load: Callable[[Mapping[str, Any]], T]) -> T:
    if not config.data.get("download"):
        return load({})
    loaded: list[T] = []
    missing: list[str] = []
    try:
        loaded.append(load({"download": False}))
    except Unfit:
        raise
    except InputError as error:
        missing = error.messages
    if not world.agreement.first_error("missing data", missing):
        return loaded[0]
    refused: list[str] = []

    def fetch() -> None:
        try:
            loaded[:] = [load({"download": True})]
        except InputError as error:
            refused.extend(error.messages)

    world.agreement.in_turn("download", fetch)
    if refused := world.agreement.first_error("download", refused):
        raise InputError(*refused)
    return loaded[0]


class _Splits:
    """The splits of the chosen data set: its own, and a validation split cut off its training split."""

    def __init__(self, config: Config, choices: Mapping[str, str], options: Mapping[str, Any]):
        target = config.data["_target_"]
        describing = ("sample_shape", "num_outputs")  # which models refer to; a data set takes them, or does not
        node = {key: value for key, value in config.data.items() if key not in describing or accepts(target, key)}
        self._node, self._choices = {**node, **options}, choices
        self._data = f"data={choices.get('data', target)}"
        self._option = split_option(target)
        self._names = {
            "train": ("train", "val"),
            "split": literals(target, "split") or SPLITS,
            None: ("train",),
        }[self._option]
        self._fraction, self._seed = config.val_fraction, config.seed
        self._whole: Any = None  # the training split before anything is cut off

    def load(self, split: str) -> Any:
        if split == "test" or (split == "train" and self._fraction is None):
            return self._own(split)
        if self._fraction is None:
            try:
                return self._own(split)
            except NoSplit as error:
                reason = f" ({error})" if str(error) else ""
                raise Unfit(
                    f"{self._data} has no validation split{reason}; set val_fraction=0.1 to cut one off its training "
                    "split"
                ) from None
        return self._cut(split)

    def _own(self, split: str) -> Any:
        """A split that the data set has itself; NoSplit where it has none of that name."""
        if split not in self._names:
            if split == "val":
                raise NoSplit("")
            raise NoSplit(f"split={split}: {self._data} has no such split; it has {' and '.join(self._names)}")
        provided: Any = {"train": {"train": split == "train"}, "split": {"split": split}, "": {}}[self._option or ""]
        try:
            made = make_group(self._choices, "data", self._node, **provided)
        except InputError as error:
            if self._option == "split" and split != "train" and re.search(r"\bsplit\b", str(error)):
                raise NoSplit(*(message.removeprefix(f"{self._data}: ") for message in error.messages)) from None
            raise
        except KeyError as error:
            if error.args != (split,):
                raise
            raise NoSplit(f"split={split}: {self._data} has no such split" if split != "val" else "") from None
        self._check(made, split)
        return as_batches(made)

    def _cut(self, split: str) -> Any:
        """The training split without the validation samples, or these: drawn from the seed, the same on all ranks."""
        assert self._fraction is not None
        if self._whole is None:
            if self._has_validation():
                raise Unfit(
                    f"val_fraction={self._fraction} has no effect, because {self._data} has a validation split of its "
                    "own; leave it out"
                )
            self._whole = self._own("train")
        num_samples = len(self._whole)
        num_val = round(num_samples * self._fraction)
        if not 0 < num_val < num_samples:
            raise Unfit(
                f"val_fraction={self._fraction} of the {num_samples} samples of {self._data} are {num_val}, and both "
                "splits need one; "
                + (f"try val_fraction={max(0.1, 1 / num_samples):.2g}" if num_samples > 1 else "give it more samples")
            )
        order = torch.randperm(num_samples, generator=generator(self._seed, _CUT))
        rows = order[:num_val] if split == "val" else order[num_val:]
        return Part(self._whole, rows.sort().values)  # files are read from their beginning to their end

    def _has_validation(self) -> bool:
        if self._option != "split" or "val" not in self._names:
            return "val" in self._names
        try:
            self._own("val")
        except NoSplit:
            return False
        return True

    def _check(self, made: Any, split: str) -> None:
        if isinstance(made, IterableDataset):
            raise InputError(
                f"{self._data}: an IterableDataset has no length or index, by which the samples of a step are chosen; "
                "give a map-style data set, with __len__ and __getitem__"
            )
        if missing := [name for name in ("__len__", "__getitem__") if not hasattr(made, name)]:
            raise InputError(f"{self._data}: {type(made).__name__} lacks {' and '.join(missing)}, which data sets have")
        if len(made) == 0:
            raise InputError(f"{self._data}: its {split} split holds no sample; give it one at least")
