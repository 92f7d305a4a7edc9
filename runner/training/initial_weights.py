"""`init_from`: the weights that a run begins with come from a file, into the whole model or part by part."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from runner.config.schema import InitFrom
from runner.errors import InputError
from runner.training.names import counted, near
from runner.training.weights_file import Header, WeightsFile, open_weights

ARROW = "->"  # between a pattern and what it is replaced with
_TAKEN, _LEFT, _SHAPES = 8, 20, 5  # names that are listed


@dataclass(frozen=True)
class _Slot:
    """A tensor of the model by one of its names."""

    aliases: list[str]  # all of its names: several, where modules share it
    header: Header
    counts_batches: bool  # a normalisation layer's num_batches_tracked


class InitialWeights:
    """What of a file goes where in a model, settled by names and shapes; `fill` then copies the values.

    Raises InputError for what cannot be read or does not fit.
    """

    def __init__(self, options: InitFrom, path: Path, module: nn.Module):
        self._typed = f"init_from.path={options.path}"
        self._path = path
        try:
            self._file: WeightsFile | None = open_weights(path)
        except ValueError as error:
            raise InputError(f"{self._typed}: {error}") from None
        headers = self._file.headers
        renamed = _rename(options.map, headers)
        slots = _slots(module)
        sources = {name: source for name, slot in slots.items() if (source := _source(name, slot, renamed))}
        self._unfit = [name for name, source in sources.items() if headers[source] != slots[name].header]
        used = {alias for name in sources for alias in slots[name].aliases}
        self._unused = [source for name, source in renamed.items() if name not in used]
        self._shapes = {name: (headers[sources[name]], slots[name].header) for name in self._unfit}
        missing = [name for name in slots if name not in sources]
        if options.strict:
            self._check(slots, renamed, missing)
        self._left = {name: source for name, source in sources.items() if name not in self._unfit}
        if not self._left:
            raise InputError(
                f"{self._typed}: none of its {_weights(len(headers))} has the name and shape of one of the model's; it "
                f"has {counted(list(headers), 3)}, the model {counted(list(slots), 3)}{self._fix(renamed, slots)}"
            )
        self._check_ties(slots, renamed)
        self._taken = list(self._left)
        self.as_initialised = [name for name in slots if name not in self._left]
        self._num_weights = len(slots)

    def _check(self, slots: Mapping[str, _Slot], renamed: Mapping[str, str], missing: Sequence[str]) -> None:
        """Raises InputError with all that a file that fits does not have."""
        messages = []
        if self._unfit:
            messages.append(
                f"{self._typed}: {_weights(len(self._unfit))} of another shape: {self._list_shapes(_SHAPES)}; "
                "init_from.strict=false leaves "
                "the model's as initialised"
            )
        if lacking := [name for name in missing if not slots[name].counts_batches]:
            messages.append(
                f"{self._typed} lacks {_weights(len(lacking))} of the model: {counted(lacking, 4)}"
                f"{self._fix(renamed, slots)}; or leave them as initialised by init_from.strict=false"
            )
        if self._unused:
            messages.append(
                f"{self._typed} has {_weights(len(self._unused))} that the model has not: {counted(self._unused, 4)}"
                f"{self._fix(renamed, slots)}; or do not take them by init_from.strict=false"
            )
        if messages:
            raise InputError(*messages)

    def _check_ties(self, slots: Mapping[str, _Slot], renamed: Mapping[str, str]) -> None:
        """Raises InputError where the file has two values for what is one weight here."""
        assert self._file is not None
        for aliases in {id(slot.aliases): slot.aliases for slot in slots.values()}.values():
            there = [alias for alias in aliases if alias in renamed and alias in self._left]
            for other in there[1:]:
                if not torch.equal(self._file.read(renamed[there[0]]), self._file.read(renamed[other])):
                    raise InputError(
                        f"{self._typed} has different values of {there[0]} and {other}, which are one weight of the "
                        f"model; leave one out by init_from.map='[\"^{re.escape(renamed[other])}${ARROW}\"]'"
                    )

    def _fix(self, renamed: Mapping[str, str], slots: Mapping[str, _Slot]) -> str:
        """The map to type, where the names differ by what stands before them."""
        prefixes: Counter[str] = Counter()
        mine, theirs = [n for n in slots if n not in renamed], [n for n in renamed if n not in slots]
        for name in mine:
            longer = [other[: -len(name)] for other in theirs if other.endswith(f".{name}")]
            prefixes.update(f"^{prefix.replace('.', '[.]')}{ARROW}" for prefix in longer)
            prefixes.update(f"^{ARROW}{name[: -len(other)]}" for other in theirs if name.endswith(f".{other}"))
        if not prefixes:
            return ""
        return f"; try init_from.map='[\"{prefixes.most_common(1)[0][0]}\"]'"

    def _list_shapes(self, most: int) -> str:
        both = [f"{name} {there} in the file, {here} in the model" for name, (there, here) in self._shapes.items()]
        return counted(both, most, "; ")

    def describe(self) -> list[str]:
        """Lines of a run's header: what was taken, and what was not."""
        lines = [
            f"init     {self._path}, {len(self._taken):,} of {self._num_weights:,} weights: "
            f"{counted(self._taken, _TAKEN)}"
        ]
        if left := [name for name in self.as_initialised if name not in self._unfit]:
            lines.append(f"         not in the file, and as initialised: {counted(left, _LEFT)}")
        if self._unfit:
            lines.append(f"         of another shape, and as initialised: {self._list_shapes(_LEFT)}")
        if self._unused:
            lines.append(f"         not taken from the file: {counted(self._unused, _LEFT)}")
        return lines

    def warn_of(self, frozen: Sequence[str]) -> list[str]:
        """A line, where parameters are frozen that the file did not give."""
        drawn = [name for name in frozen if name in self.as_initialised]
        if not drawn:
            return []
        return [
            f"freeze: {_weights(len(drawn))} not from {self._typed} will stay as initialised: {counted(drawn, _LEFT)}"
        ]

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Copy values into the module's tensors that have memory and were not given theirs yet."""
        for name, tensor in _named_tensors(module):
            if name in self._left and not tensor.is_meta:
                assert self._file is not None
                tensor.copy_(self._file.read(self._left.pop(name)))
        if not self._left:
            self._file = None


def _named_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))


def _slots(module: nn.Module) -> dict[str, _Slot]:
    """What of the module a state dict holds, by each of its names."""
    kept = module.state_dict()
    named = {name: tensor for name, tensor in _named_tensors(module) if name in kept}
    aliases: dict[int, list[str]] = {}
    for name, tensor in named.items():
        aliases.setdefault(id(tensor), []).append(name)
    counts = {
        f"{name}.num_batches_tracked" if name else "num_batches_tracked"
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, _NormBase)
    }
    return {
        name: _Slot(aliases[id(tensor)], Header(tuple(tensor.shape), tensor.is_floating_point()), name in counts)
        for name, tensor in named.items()
    }


def _source(name: str, slot: _Slot, renamed: Mapping[str, str]) -> str | None:
    """What the file calls the tensor: a file may have what is shared once, by any of its names."""
    return next((renamed[alias] for alias in (name, *slot.aliases) if alias in renamed), None)


def _rename(entries: Sequence[str], headers: Mapping[str, Header]) -> dict[str, str]:
    """The file's names by what the entries, one after the other, make of them; one that gets empty is left out.

    Raises InputError for an entry that changes nothing, and where two become one.
    """
    names = {name: name for name in headers}  # what each is called by now
    for index, entry in enumerate(entries):
        pattern, replacement = entry.split(ARROW)
        typed = f"init_from.map.{index}={entry}"
        try:
            changed = {name: re.sub(pattern, replacement, now) for name, now in names.items() if now}
        except (re.error, IndexError) as error:
            raise InputError(f"{typed}: {error}; \\1 in the replacement is the pattern's first group") from None
        if not any(re.search(pattern, now) for now in names.values() if now):
            raise InputError(f"{typed} matches no name in the file; {near(pattern, list(names.values()))}")
        names |= changed
    renamed: dict[str, str] = {}
    for name, now in names.items():
        if now in renamed:
            raise InputError(
                f"init_from.map={list(entries)} gives {renamed[now]} and {name} one name, {now}; leave one out"
            )
        if now:
            renamed[now] = name
    return renamed


def _weights(count: int) -> str:
    return "1 weight" if count == 1 else f"{count:,} weights"
