"""`init_from`: the weights that a run starts with are read from a file or from a checkpoint of another run."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from runner.checkpoints.layout import MANIFEST, choose_checkpoint, list_checkpoints, verify
from runner.checkpoints.weights_file import Header, WeightsFile, open_weights
from runner.config.diagnostics.import_target import locate
from runner.config.schema import Config, InitFrom
from runner.distributed.world import World
from runner.errors import InputError, near_hint
from runner.optimization.parameter_patterns import counted, near
from runner.records.ledger import is_sweep
from runner.records.run_directory import CHECKPOINTS

ARROW = "->"  # between a pattern and its replacement
_LOADED, _SKIPPED, _SHAPES = 8, 20, 5  # names that are listed


def find_initial_weights(config: Config, directory: str | None, world: World) -> Path | None:
    """Return the result of `locate_initial_weights` on rank 0. All ranks must call it.

    `directory` is the run directory if it is known already; after a restart the previous attempt has created it.
    """
    if config.init_from.path is None:
        return None

    def find() -> str:
        return str(locate_initial_weights(config, directory or world.consensus.before_restart("directory")) or "")

    try:
        found = world.consensus.broadcast("init_from", find)
    except ValueError as error:
        raise InputError(str(error)) from None
    return Path(found) if found else None


def locate_initial_weights(config: Config, directory: str | None) -> Path | None:
    """Return the file or checkpoint that `init_from` names. Raise InputError if it cannot be read.

    Return None without `init_from`, or if the run continues from a checkpoint, its own or that of `run=`.
    """
    if config.init_from.path is None or locate(config.task["_target_"]).reads_checkpoint:
        return None
    if directory is not None and list_checkpoints(Path(directory) / CHECKPOINTS):
        return None
    try:
        return _resolve(Path(config.init_from.path)).absolute()
    except ValueError as error:
        raise InputError(f"init_from.path={config.init_from.path}: {error}") from None


def _resolve(path: Path) -> Path:
    """Return a file, or the directory of a verified checkpoint. Raise ValueError if the path is or contains neither."""
    if path.is_dir():
        if is_sweep(path):
            raise ValueError("it is a sweep; name one of its jobs")
        if (path / MANIFEST).is_file():
            checkpoint = path.resolve()  # of a link, which may change meanwhile
            verify(checkpoint)
            return checkpoint
        if not (path / CHECKPOINTS).is_dir():
            raise ValueError("it is a directory, but neither a run directory nor a checkpoint; name a file in it")
        if not list_checkpoints(path / CHECKPOINTS):
            raise ValueError("the run has no checkpoint yet")
        return choose_checkpoint(path / CHECKPOINTS)
    if not path.is_file():
        siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ValueError(f"no such file or directory{near_hint(path.name, siblings)}")
    if (path.parent / MANIFEST).is_file():  # a file of a checkpoint
        verify(path.parent)
        return path.parent.resolve()
    return path


@dataclass(frozen=True)
class _Slot:
    """A tensor of the model, by one of its names."""

    aliases: list[str]  # all its names: several if modules share it
    header: Header


class InitialWeights:
    """The assignment of a file's tensors to a model's, decided by names and shapes; `fill` then copies the values.

    Raises InputError if the file cannot be read or does not fit.
    """

    def __init__(self, options: InitFrom, path: Path, module: nn.Module):
        self._option = f"init_from.path={options.path}"
        self._path = path
        try:
            self._file: WeightsFile | None = open_weights(path)
        except ValueError as error:
            raise InputError(f"{self._option}: {error}") from None
        headers = self._file.headers
        renamed = _rename(options.map, headers)
        slots = _slots(module)
        # Names in the file by the model's; the file may contain a shared tensor once, under any of its names.
        sources = {
            name: source
            for name, slot in slots.items()
            if (source := next((renamed[alias] for alias in (name, *slot.aliases) if alias in renamed), None))
        }
        used = {alias for name in sources for alias in slots[name].aliases}
        self._unused = [source for name, source in renamed.items() if name not in used]
        self._misfits = [
            f"{name} {headers[source]} in the file, {slots[name].header} in the model"
            for name, source in sources.items()
            if headers[source] != slots[name].header
        ]
        if options.strict:
            self._check(slots, renamed, [name for name in slots if name not in sources])
        # What is still to be copied: the name in the file by the name in the model.
        self._pending = {name: source for name, source in sources.items() if headers[source] == slots[name].header}
        if not self._pending:
            raise InputError(
                f"{self._option}: none of its {_weights(len(headers))} has the name and shape of one of the model's; "
                f"it has {counted(list(headers), 3)}, the model {counted(list(slots), 3)}{self._hint(renamed, slots)}"
            )
        self._check_ties(slots, renamed)
        self._loaded = list(self._pending)
        self._absent = [name for name in slots if name not in sources]  # from the file
        self._num_weights = len(slots)

    def _check(self, slots: Mapping[str, _Slot], renamed: Mapping[str, str], absent: Sequence[str]) -> None:
        """Raise InputError, with all reasons, unless the file has exactly the model's weights."""
        messages = []
        if self._misfits:
            messages.append(
                f"{self._option}: {_weights(len(self._misfits))} of another shape: "
                f"{counted(self._misfits, _SHAPES, '; ')}; init_from.strict=false keeps the model's initial values"
            )
        if missing := [name for name in absent if not name.endswith("num_batches_tracked")]:
            messages.append(
                f"{self._option} lacks {_weights(len(missing))} of the model: {counted(missing, 4)}"
                f"{self._hint(renamed, slots)}; or keep their initial values by init_from.strict=false"
            )
        if self._unused:
            messages.append(
                f"{self._option} has {_weights(len(self._unused))} that the model does not have: "
                f"{counted(self._unused, 4)}{self._hint(renamed, slots)}; or skip them by init_from.strict=false"
            )
        if messages:
            raise InputError(*messages)

    def _check_ties(self, slots: Mapping[str, _Slot], renamed: Mapping[str, str]) -> None:
        """Raise InputError if the file has two different values for one shared weight."""
        assert self._file is not None
        for aliases in {id(slot.aliases): slot.aliases for slot in slots.values()}.values():
            first, *others = [alias for alias in aliases if alias in renamed and alias in self._pending] or [""]
            for other in others:
                if not torch.equal(self._file.read(renamed[first]), self._file.read(renamed[other])):
                    raise InputError(
                        f"{self._option} has different values of {first} and {other}, which are one weight of the "
                        f"model; leave one out by init_from.map='[\"^{re.escape(renamed[other])}${ARROW}\"]'"
                    )

    def _hint(self, renamed: Mapping[str, str], slots: Mapping[str, _Slot]) -> str:
        """Suggest a map if the names differ by a prefix."""
        prefixes: Counter[str] = Counter()
        mine, theirs = [n for n in slots if n not in renamed], [n for n in renamed if n not in slots]
        for name in mine:
            longer = [other[: -len(name)] for other in theirs if other.endswith(f".{name}")]
            prefixes.update(f"^{prefix.replace('.', '[.]')}{ARROW}" for prefix in longer)
            prefixes.update(f"^{ARROW}{name[: -len(other)]}" for other in theirs if name.endswith(f".{other}"))
        return f"; try init_from.map='[\"{prefixes.most_common(1)[0][0]}\"]'" if prefixes else ""

    def describe(self) -> list[str]:
        """Return lines for the run's header: which weights were loaded, and which were not."""
        loaded = counted(self._loaded, _LOADED)
        lines = [f"init     {self._path}, {len(self._loaded):,} of {self._num_weights:,} weights: {loaded}"]
        if self._absent:
            lines.append(f"         not in the file, initial values kept: {counted(self._absent, _SKIPPED)}")
        if self._misfits:
            lines.append(f"         of another shape, initial values kept: {counted(self._misfits, _SKIPPED, '; ')}")
        if self._unused:
            lines.append(f"         in the file, but not loaded: {counted(self._unused, _SKIPPED)}")
        return lines

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Copy the values of those tensors of the module that have memory and were not filled before."""
        for name, tensor in _named_tensors(module):
            if name in self._pending and not tensor.is_meta:
                assert self._file is not None
                tensor.copy_(self._file.read(self._pending.pop(name)))
        if not self._pending:
            self._file = None


def _named_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))


def _slots(module: nn.Module) -> dict[str, _Slot]:
    """Return what a state dict of the module contains, by each name."""
    state = module.state_dict()
    named = {name: tensor for name, tensor in _named_tensors(module) if name in state}
    aliases: dict[int, list[str]] = {}
    for name, tensor in named.items():
        aliases.setdefault(id(tensor), []).append(name)
    return {
        name: _Slot(aliases[id(tensor)], Header(tuple(tensor.shape), tensor.is_floating_point()))
        for name, tensor in named.items()
    }


def _rename(entries: Sequence[str], headers: Mapping[str, Header]) -> dict[str, str]:
    """Apply the entries to the file's names, one after the other. Return the original names by the new ones.

    A name that becomes empty is left out. Raise InputError if an entry matches nothing or two names become equal.
    """
    names = {name: name for name in headers}  # the current name of each
    for index, entry in enumerate(entries):
        pattern, replacement = entry.split(ARROW)
        option = f"init_from.map.{index}={entry}"
        try:
            changed = {name: re.sub(pattern, replacement, now) for name, now in names.items() if now}
        except (re.error, IndexError) as error:
            raise InputError(f"{option}: {error}; \\1 in the replacement is the pattern's first group") from None
        if not any(re.search(pattern, now) for now in names.values() if now):
            raise InputError(f"{option} matches no name in the file; {near(pattern, list(names.values()))}")
        names |= changed
    renamed: dict[str, str] = {}
    for name, now in names.items():
        if now in renamed:
            raise InputError(
                f"init_from.map={list(entries)} gives {renamed[now]} and {name} the same name, {now}; leave one out"
            )
        if now:
            renamed[now] = name
    return renamed


def _weights(count: int) -> str:
    return "1 weight" if count == 1 else f"{count:,} weights"
