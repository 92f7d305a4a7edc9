"""The splits of the data, downloaded once per machine if they are missing."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset

from runner.config.diagnostics.import_target import locate
from runner.config.diagnostics.signature import accepts, literals, split_option
from runner.config.diagnostics.type_hints import show
from runner.config.instantiate import make_group
from runner.config.schema import SPLITS, Config
from runner.distributed.world import World
from runner.errors import InputError, failed_with
from runner.input.augmentation import augment
from runner.input.device_samples import VALUE
from runner.input.rng import derive_seed
from runner.input.sample_cache import CannotCache
from runner.input.source import Source
from runner.input.stream import UNKNOWN_LENGTH, Stream, decode_state, encode_state

T = TypeVar("T")
_SPLIT_KEY = 2**63  # of the stream that draws the validation samples; no epoch has this number


class NoSplit(InputError):
    """The dataset does not support the splits of the configuration, whether its files exist or not."""


def load_data(config: Config, choices: Mapping[str, str], world: World) -> tuple[Source, Source]:
    """Return the training data and the evaluated data (config.split). All ranks must call it.

    If files are missing, one process per machine downloads them first. Raise InputError if the dataset lacks a split,
    indexing, length or samples, or if its samples cannot be kept in memory.
    """

    def load(options: Mapping[str, Any]) -> tuple[Source, Source]:
        splits = _Splits(config.data, choices, options, config.val_fraction, config.seed, config.val_fold)
        train = splits.load("train")
        return train, train if config.split == "train" else splits.load(config.split)

    train, evaluated = _load_or_download(config.data, world, load)
    try:
        _check_streams(config, choices, train, evaluated, world)
        device = world.device if config.keep_samples == VALUE else None
        for source in dict.fromkeys((train, evaluated)) if config.keep_samples else ():
            source.cache_samples() if device is None else source.keep_on(device)
        keeps_shapes = "sample_shape" in config.data
        train = augment(train, config.transforms, config.seed, config.transform_targets, keeps_shapes, device)
        return train, evaluated
    except InputError:
        raise
    except CannotCache as error:
        raise InputError(str(error)) from None
    except Exception as error:  # of the dataset
        raise InputError(f"data: its first sample cannot be read{failed_with(error)}") from None


def _check_streams(config: Config, choices: Mapping[str, str], train: Source, evaluated: Source, world: World) -> None:
    """Raise InputError if a stream has no samples or wrong parts, or if the configuration does not support streams."""
    for source in dict.fromkeys((train, evaluated)):
        stream, data = source.dataset, f"data={choices.get('data', config.data['_target_'])}"
        if not isinstance(stream, Stream):
            continue
        if config.keep_samples:
            key = f"keep_samples={show(config.keep_samples)}"
            raise InputError(f"{key} needs map-style datasets, and {data} is a stream; leave it out")
        task = locate(config.task["_target_"])
        if source is evaluated and task.section == "predict":
            raise InputError(f"task=predict: {data} is a stream, whose samples have no index; use a map-style dataset")
        if source is train and task.trains and not stream.has_length:
            if config.max_steps is None:
                raise InputError(f"max_steps=null: {data} is a stream without a length; try max_steps=1000")
            if "every_epochs" in config.scheduler or config.scheduler.get("every") == "epoch":
                raise InputError(
                    f"scheduler={choices['scheduler']} counts epochs, and {data} is a stream without a length; try "
                    "scheduler=cosine"
                )
        is_evaluated = source is evaluated and (task.trains or task.picks_split)
        if is_evaluated and not stream.has_length and config.eval_batches is None:
            raise InputError(
                f"eval_batches=null: {data} is a stream without a length; define __len__, or try eval_batches=100"
            )
        found, state, _ = stream.load(0, 1)
        if not found:
            raise InputError(f"{data}: its {'train' if source is train else config.split} split has no samples")
        if stream.can_split and (problem := stream.find_wrong_split(max(2, world.world_size))):
            raise InputError(f"{data}: {problem}, or be left out")
        try:
            decode_state(encode_state(state))
        except Exception:  # torch does not load classes that could run code
            raise InputError(
                f"{data}: its state_dict cannot be stored; use only tensors, numbers, text, lists, tuples and dicts"
            ) from None


def load_split(config: Config, choices: Mapping[str, str], world: World, split: str) -> Source:
    """Return one split: train, val or test. See `load_data`."""

    def load(options: Mapping[str, Any]) -> Source:
        return _Splits(config.data, choices, options, config.val_fraction, config.seed, config.val_fold).load(split)

    return _load_or_download(config.data, world, load)


def _load_or_download(node: Mapping[str, Any], world: World, load: Callable[[Mapping[str, Any]], T]) -> T:
    """Load the data. If files are missing on any rank, download them first."""
    if not node.get("download"):
        return load({})
    loaded: list[T] = []
    missing: list[str] = []
    try:
        loaded.append(load({"download": False}))
    except NoSplit:
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
    """The splits that the dataset itself has, and a validation split that is drawn from its training split."""

    def __init__(
        self,
        node: Mapping[str, Any],
        choices: Mapping[str, str],
        options: Mapping[str, Any],
        val_fraction: float | None,
        seed: int,
        val_fold: int | None,
    ):
        target = node["_target_"]
        shapes = ("sample_shape", "num_outputs")  # models refer to these keys; a dataset may accept them too
        accepted = {key: value for key, value in node.items() if key not in shapes or accepts(target, key)}
        self._node, self._choices = {**accepted, **options}, choices
        self._data = f"data={choices.get('data', target)}"
        self._option = split_option(target)
        self._names = {
            "train": ("train", "val"),
            "split": literals(target, "split") or SPLITS,
            None: ("train",),
        }[self._option]
        self._fraction, self._seed, self._fold = val_fraction, seed, val_fold
        self._whole: Source | None = None  # the dataset's training split, including validation samples

    def load(self, split: str) -> Source:
        if self._fraction is not None and split != "test":
            return self._split_off(split, self._fraction)
        return self._existing(split)

    def _existing(self, split: str) -> Source:
        """Return a split that the dataset itself has. Raise NoSplit if it has no split of that name."""
        problem = f"split={split}: {self._data} has no such split"
        if split == "val":
            problem = f"{self._data} has no validation split; set val_fraction=0.1 to take it from the training split"
        if split not in self._names:
            raise NoSplit(problem)
        options: Any = {"train": {"train": split == "train"}, "split": {"split": split}, None: {}}[self._option]
        try:
            dataset = make_group(self._choices, "data", self._node, **options)
        except (InputError, KeyError) as error:
            refuses = re.search(r"\bsplit\b", str(error)) if isinstance(error, InputError) else error.args == (split,)
            if self._option == "split" and split != "train" and refuses:
                raise NoSplit(problem) from None
            raise
        iterates_only = hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset) or iterates_only:
            dataset = Stream(dataset)
        if missing := [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]:
            raise InputError(
                f"{self._data}: {type(dataset).__name__} lacks {' and '.join(missing)}, by which a map-style dataset "
                "selects the samples of a step; an IterableDataset needs neither"
            )
        if len(dataset) == 0:
            raise InputError(f"{self._data}: its {split} split has no samples; at least one is required")
        if len(dataset) >= UNKNOWN_LENGTH and not isinstance(dataset, Stream):
            raise InputError(
                f"{self._data}: {type(dataset).__name__} has {len(dataset):,} samples, and an order supports "
                "fewer than 2^62; if it has no end, derive it from IterableDataset and set max_steps"
            )
        return Source.of(dataset)

    def _split_off(self, split: str, fraction: float) -> Source:
        """Return a part of the training split: samples that are drawn with the seed for val, the others for train."""
        if self._whole is None:
            if self._has_validation():
                raise NoSplit(
                    f"val_fraction={fraction} has no effect, because {self._data} has a validation split; leave it out"
                )
            self._whole = self._existing("train")
            if isinstance(self._whole.dataset, Stream):
                raise NoSplit(
                    f"val_fraction={fraction}: {self._data} is a stream, which cannot be split; give it a validation "
                    "split, which may be map-style"
                )
        num_samples = len(self._whole)
        num_val = round(num_samples * fraction)
        if not 0 < num_val < num_samples:
            raise NoSplit(
                f"val_fraction={fraction} of the {num_samples} samples of {self._data} are {num_val}, but both splits "
                "need one; try val_fraction=0.1, or use more samples"
            )
        generator = torch.Generator().manual_seed(derive_seed(self._seed, _SPLIT_KEY))
        order = torch.randperm(num_samples, generator=generator)
        first, last = 0, num_val
        if self._fold is not None:  # sizes of folds differ by at most one sample
            first, last = (num_samples * number // round(1 / fraction) for number in (self._fold, self._fold + 1))
        rows = order[first:last] if split == "val" else torch.cat([order[:first], order[last:]])
        return replace(self._whole, rows=rows.sort().values)  # sorted, so that files are read sequentially

    def _has_validation(self) -> bool:
        with suppress(NoSplit):
            return self._option == "train" or self._existing("val") is not None
        return False
