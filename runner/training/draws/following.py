"""Random numbers of a forward pass that follow the samples: the seeds, and a mode that replaces torch's functions."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from runner.distributed.sync_batch_norm import Uncounted
from runner.errors import calling_line
from runner.input.batch import MicroBatch
from runner.input.rng import derive_seed, seed_all
from runner.training.draws.functions import DrawMode
from runner.training.draws.generator import Rows, sample_keys
from runner.training.model.submodules import called_modules

log = logging.getLogger(__name__)


@dataclass
class Draws:
    """The draws of the model and the objective of a run, which the dry run has recorded, and the seed of the step.

    Attributes:
        follows: True if the random numbers follow the samples. False if nothing is drawn, or if a draw cannot follow
            them: torch then draws all numbers, with a different seed for each data rank.
        sample_dims: The dim of the samples, by function and number of dims.
        repeats: How many times the samples occur along their dim, by function and number of dims; 1 if it is missing. 0
            means that the entries of a sample are not adjacent, as in torch.cat([x, x]).
        find_repeats: Returns the number of repeats for a tensor that a random function receives, in a dry run.
        common: The functions and shapes of draws that all samples share.
        of_samples: The functions and shapes of the other draws for one sample, and the lines of user code.
        recomputes: True if the model itself calls torch.utils.checkpoint around a draw.
        for_gradients: True if hooks of gradients draw.
        shard: The index of this rank's part and the number of parts, while a forward computes sharded features.
        positions: The positions of each sample, (N, T, ...), that this rank computes; None if it computes all of them.
        calls: For each micro-batch, the stage in which each call of a random function draws; None if not recorded.
        given: The results of `numbers` on the device while a step is captured in a CUDA graph; otherwise None.
    """

    device: torch.device = field(default_factory=functools.partial(torch.device, "cpu"))
    follows: bool = False
    sample_dims: dict[tuple[str, int], int] = field(default_factory=dict)
    repeats: dict[tuple[str, int], int] = field(default_factory=dict)
    find_repeats: Callable[[tuple[str, int], int, int, Tensor], int] | None = None
    common: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    of_samples: dict[tuple[str, tuple[int, ...]], set[str]] = field(default_factory=dict)
    recomputes: bool = False
    for_gradients: bool = False
    shard: tuple[int, int] | None = None
    positions: range | None = None
    key: int = 0
    calls: list[list[int]] | None = None
    given: Iterator[Tensor] | None = None
    _part: int = 0
    _stage: int = 0
    _computed_stage: int = 0
    _is_following: bool = False
    _has_warned: bool = False

    def begin(self, *key: int, data_rank: int | None) -> None:
        """Seed torch, NumPy and `random` for a step or an evaluation."""
        self.key = derive_seed(*key)
        seed_all(self.key if self.follows else derive_seed(*key, data_rank or 0), self.device)

    @contextmanager
    def following(
        self, micro_batch: MicroBatch, part: int = 0, key: int | None = None, stage: int = 0
    ) -> Iterator[None]:
        """Let the random functions of torch draw the numbers of the samples of a micro-batch.

        BatchNorm ignores the sample of a rank without samples, which is not counted.

        Args:
            micro_batch: The samples.
            part: The index of the loss. Each loss draws different numbers.
            key: The seed; None for that of the step.
            stage: The index of the stage that a rank of a pipeline computes.
        """
        with nullcontext() if micro_batch.num_samples else Uncounted():
            if not self.follows:
                yield
                return
            self.key = self.key if key is None else key
            self._part, self._computed_stage, self._is_following = part, stage, True
            self._seed(0)
            if self.calls is not None:
                self.calls.append([])
            try:
                with Following(self, micro_batch):
                    yield
            finally:
                self._is_following = False

    def _seed(self, stage: int) -> None:
        self._stage = stage
        if self.given is None:
            seed_all(derive_seed(self.key, self._part, stage), self.device)

    def numbers(self, micro_batch: MicroBatch, calls: Sequence[int]) -> list[Tensor]:
        """Seed and draw on the CPU as the forward of a micro-batch does in these calls, given by their stages.

        Return the indices of the samples, (n,), and two numbers of each call, (2,), in int64; nothing without calls.
        """
        self._seed(0)
        found = [_indices(micro_batch)] if calls else []
        for stage in calls:
            if stage != self._stage:
                self._seed(stage)
            found.append(_call_numbers())
        return found

    def indices_on_device(self, micro_batch: MicroBatch) -> Tensor:
        """Return the indices of the samples, (n,)."""
        return self._to_device(_indices(micro_batch)) if self.given is None else next(self.given)

    def call_on_device(self) -> Tensor:
        """Return two random numbers for the next call of a random function, (2,)."""
        if self.given is not None:
            return next(self.given)
        if self.calls is not None:
            self.calls[-1].append(self._stage)
        return self._to_device(_call_numbers())

    def _to_device(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.device, non_blocking=True)

    def seed_stages(self, model: nn.Module, stages: Sequence[nn.Module]) -> bool:
        """Seed the generators again before each stage, so that a pipeline's ranks draw what one process draws.

        Return False, and do nothing, if a stage begins with a module that another stage calls as well, or if the model
        calls torch.utils.checkpoint, whose recomputation may start in any stage.
        """
        called = [called_modules(model, stage) for stage in stages]
        entries = {number: modules[0] for number, modules in enumerate(called) if number and modules}
        if self.recomputes or any(sum(entry in modules for modules in called) > 1 for entry in entries.values()):
            return False

        def enter(number: int) -> None:
            # Do nothing in a dry run, or if the stage calls the module again, or the objective calls the model again.
            if self._is_following and number > self._stage:
                self._seed(number)

        for number, entry in entries.items():
            entry.register_forward_pre_hook(lambda module, inputs, number=number: enter(number))
        return True

    @property
    def precedes_stage(self) -> bool:
        """True until the computed stage of a pipeline calls its first module, which seeds the generators."""
        return self._stage < self._computed_stage

    def repeats_of(self, kind: tuple[str, int], width: int, dim: int, like: Tensor | None) -> int:
        """Return how many times the samples occur along their dim, which has `width` entries per sample."""
        if self.find_repeats is not None and like is not None and width > 1:
            return self.find_repeats(kind, width, dim, like)
        repeats = self.repeats.get(kind, 1) or max(1, width)
        if width % repeats:
            self.warn(f"{kind[0]} draws for {width} entries per sample, unlike in the dry run")
            return 1
        return repeats

    def warn(self, what: str) -> None:
        """Log once that a draw does not follow the samples."""
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s: %s; results depend on the number of ranks and micro_batches", calling_line(), what)


class Following(DrawMode):
    """Replaces the numbers that random functions draw for the samples of a micro-batch.

    The key of a call is drawn from torch's CPU generator. torch.utils.checkpoint restores the state of this generator,
    so a recomputation draws the same numbers.
    """

    def __init__(self, draws: Draws, micro_batch: MicroBatch):
        super().__init__()
        self._draws, self._micro_batch = draws, micro_batch
        self._num_samples = micro_batch.num_samples or micro_batch.rows

    @functools.cached_property
    def _keys(self) -> Tensor:
        return sample_keys(self._draws.indices_on_device(self._micro_batch))

    def rows(
        self, function: Any, shape: Sequence[int], kwargs: Any, like: Tensor | None, in_order: bool
    ) -> Rows | None:
        name, draws, size, count = function.__name__, self._draws, torch.Size(shape), max(1, self._num_samples)
        if draws.precedes_stage:
            draws.warn(f"{name} draws before the first module of a pipeline's stage")
        if (name, size) in draws.common:
            return None
        if (dim := draws.sample_dims.get((name, len(size)))) is None or size[dim] % count:
            draws.warn(f"{name} draws a tensor of shape {[*size]}, unlike in the dry run")
            return None
        of_one = of_sample(size, dim, count)
        start = self._start(name, of_one, dim)
        repeats = draws.repeats_of((name, len(size)), of_one[dim], dim, like)
        if in_order and (start or repeats > 1 or (name, of_one) not in draws.of_samples):
            draws.warn(f"{name} draws {[*of_one]} numbers of a sample, unlike in the dry run")
        return Rows(self._keys + draws.call_on_device(), size, dim, repeats, start)

    def _start(self, name: str, of_one: tuple[int, ...], dim: int) -> tuple[int, ...]:
        """Return the first index along each dim of the part of a sample that this rank draws; () if it draws all.

        A tensor (N, T, ...) with as many positions as this rank computes has only those.

        Between sharded layers, the features (the last dim) or the heads of attention are split. Heads are the third
        last dim; in a shape such as (N * heads, L, L) it contains the samples, too. Other tensors there, such as
        residual ones, are whole. The dry run has drawn whole tensors: the dim that was larger by the number of parts is
        split. If other sizes also differ from the dry run, because samples have different lengths, the most equal sizes
        decide.
        """
        local = self._draws.positions
        if local is not None and len(of_one) == 3 and of_one[1] == len(local):
            return (0, local.start, 0)
        if (shard := self._draws.shard) is None:
            return ()
        drawn = {
            shape: lines
            for (other, shape), lines in self._draws.of_samples.items()
            if other == name and len(shape) == len(of_one)
        }
        line = calling_line()
        part, parts = shard
        scores = {-1: 0}  # by split dim; -1 for none
        for shape in [shape for shape, lines in drawn.items() if line in lines] or drawn:
            for split in (len(shape) - 3, len(shape) - 1, -1):
                whole = tuple(n * parts if d == split else n for d, n in enumerate(of_one))
                if split == -1 or (split >= 0 and whole[split] == shape[split] and (split != dim or shape[dim] > 1)):
                    equal = sum(n == m for n, m in zip(whole, shape, strict=True))
                    scores[split] = max(scores.get(split, 0), equal)
        best = max(scores, key=lambda split: (scores[split], split >= 0, split == len(of_one) - 3))
        return () if best == -1 else tuple(part * n if d == best else 0 for d, n in enumerate(of_one))


def _indices(micro_batch: MicroBatch) -> Tensor:
    return torch.tensor(micro_batch.indices or [0] * micro_batch.rows, dtype=torch.int64)


def _call_numbers() -> Tensor:
    return torch.empty(2, dtype=torch.int64).random_()


def of_sample(shape: Sequence[int], dim: int, count: int) -> tuple[int, ...]:
    """Return the shape of one of the samples."""
    return tuple(n // count if d == dim else n for d, n in enumerate(shape))
