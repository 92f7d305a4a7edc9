"""`init_from`: the weights that a run starts with are read from a file or from a checkpoint of another run."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from runner.checkpoints.base_weights import BaseWeights, complete, open_evaluated
from runner.checkpoints.layout import BEST, LAST, MANIFEST, choose_checkpoint, find_checkpoint, list_checkpoints, verify
from runner.checkpoints.saved_state import SavedState
from runner.checkpoints.weights_file import open_weights, weights_in
from runner.config.schema import InitFrom
from runner.distributed.world import World
from runner.errors import InputError, as_input_error, near_hint
from runner.optimization.parameter_patterns import counted, names_of, near
from runner.records.run_directory import CHECKPOINTS

ARROW = "->"  # between a pattern and its replacement
_DERIVED = "num_batches_tracked"  # the end of the name of a buffer that torch before 0.4 did not save
_LISTED, _LOGGED = 4, 8  # names in a message and in a line of the header


def find_initial_weights(path: str | None, directory: str | None, world: World) -> Path | None:
    """Return the result of `locate_initial_weights` on rank 0. All ranks must call it."""
    if path is None:
        return None

    def find() -> str:
        return str(locate_initial_weights(path, directory or world.consensus.before_restart("directory")) or "")

    with as_input_error():
        found = world.consensus.broadcast("init_from", find)
    return Path(found) if found else None


def locate_initial_weights(path: str | None, directory: str | None) -> Path | None:
    """Return the file or checkpoint that `init_from.path` names. Raise InputError if it cannot be read.

    Return None without a path, or if the run in `directory` continues from its own checkpoint.
    """
    if path is None:
        return None
    if directory is not None and list_checkpoints(Path(directory) / CHECKPOINTS):
        return None
    with as_input_error(f"init_from.path={path}: "):
        found = _resolve(Path(path)).absolute()
        if found.is_dir():
            complete(SavedState.open(found))  # checks the file of the frozen weights
        return found


def _resolve(path: Path) -> Path:
    """Return a file of weights, or the directory of a verified checkpoint.

    Raise ValueError if the path neither is nor contains one of them.
    """
    for named in (path, path.parent):
        if named.name in (BEST, LAST) and named.parent.name == CHECKPOINTS:  # the record decides, not the link
            path = find_checkpoint(named.parent, named.name)
    if not path.exists():
        siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ValueError(f"no such file or directory{near_hint(path.name, siblings)}")
    directory = path if path.is_dir() else path.parent
    if (directory / MANIFEST).is_file():  # a checkpoint, or a file in it
        checkpoint = directory.resolve()  # a link may change meanwhile
        verify(checkpoint)
        return checkpoint
    if path.is_file():
        return path
    if (file := weights_in(path)) is not None:
        return file
    if not list_checkpoints(path / CHECKPOINTS):
        raise ValueError(
            "it is a directory without checkpoints; name a run that has one, a checkpoint, a directory with "
            "model.safetensors, or a file"
        )
    return choose_checkpoint(path / CHECKPOINTS)


class InitialWeights:
    """The assignment of a file's tensors to a model's, decided by names and shapes; `fill` then copies the values.

    base_names: the names in the file of the tensors that have others in the model, because it has adapters. None means
    a tensor of an adapter, which the file may lack.
    """

    def __init__(self, options: InitFrom, path: Path, module: nn.Module, base_names: Mapping[str, str | None] = {}):
        self._base_names = base_names
        self._option = f"init_from.path={options.path}"
        self._path = path
        with as_input_error(f"{self._option}: "):
            self._file = open_evaluated(path) if path.is_dir() else open_weights(path)
        in_file = {name: _describe(tensor.shape, tensor.dtype) for name, tensor in self._file.items()}
        self._renamed = {self._base_name(name): source for name, source in _rename(options.map, in_file).items()}
        state = module.state_dict()
        named = [(name, tensor) for name, tensor in _named_tensors(module) if name in state]
        tensors = {
            self._base_name(name): tensor for name, tensor in named if name in self._renamed or not self._is_own(name)
        }
        self._in_model = {name: _describe(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        aliases = names_of(tensors.items())
        self._aliases = {name: aliases[tensor] for name, tensor in tensors.items()}
        # Names in the file by the model's; the file may contain a shared tensor once, under any of its names.
        sources: dict[str, str] = {}
        for name, tensor in tensors.items():
            if found := [alias for alias in (name, *aliases[tensor]) if alias in self._renamed]:
                sources[name] = self._renamed[found[0]]
        used = {alias for name in sources for alias in self._aliases[name]}
        self._unused = [source for name, source in self._renamed.items() if name not in used]
        self._absent = [name for name in self._in_model if name not in sources]
        misfits = [name for name, source in sources.items() if in_file[source] != self._in_model[name]]
        self._misfits = [
            f"{name} {in_file[sources[name]]} in the file, {self._in_model[name]} in the model" for name in misfits
        ]
        if scaled := [source for source in sources.values() if _is_8_bit(self._file[source].dtype)]:
            raise InputError(
                f"{self._option} has quantized weights of {self._file[scaled[0]].dtype}, whose scales are not "
                f"applied: {counted(scaled, _LISTED)}; convert the file to bfloat16"
            )
        if options.strict and (messages := self._differences()):
            raise InputError(*messages)
        # What is still to be copied: the name in the file by the name in the model.
        self._pending = {name: source for name, source in sources.items() if name not in misfits}
        if not self._pending:
            raise InputError(
                f"{self._option}: none of its weights has the name and shape of one of the model's; it has "
                f"{counted(list(in_file), _LISTED)}, the model {counted(list(self._in_model), _LISTED)}{self._hint()}"
            )
        self._loaded = dict(self._pending)

    def _base_name(self, name: str) -> str:
        return self._base_names.get(name, name) or name

    def _is_own(self, name: str) -> bool:
        """Return True for a tensor of an adapter."""
        return self._base_names.get(name, name) is None

    def frozen(self, module: nn.Module, rank: int) -> BaseWeights | None:
        """Return the frozen parameters that the file contains, which checkpoints leave out; None without adapters."""
        names = {name: self._loaded[base] for name, base in self._frozen(module) if base in self._loaded}
        return BaseWeights.of(self._path, names, rank)

    def warnings(self, module: nn.Module) -> list[str]:
        """Return a warning if a model with adapters keeps initial values of frozen parameters."""
        names = [base for _, base in self._frozen(module) if base not in self._loaded]
        if not names:
            return []
        return [f"{self._option} lacks {counted(names, _LISTED)}, which adapters freeze; try adapters.train=[MODULE]"]

    def _frozen(self, module: nn.Module) -> list[tuple[str, str]]:
        """Return the names in the model and in the file of the parameters that adapters freeze."""
        named = module.named_parameters(remove_duplicate=False) if self._base_names else ()
        return [(name, self._base_name(name)) for name, p in named if not p.requires_grad]

    def _differences(self) -> list[str]:
        """Return a message for each kind of difference between the file's weights and the model's."""
        missing = [name for name in self._absent if not name.endswith(_DERIVED)]
        ignoring = "; init_from.strict=false loads the others"
        fix = self._hint() or ignoring
        problems = {
            f"has weights of another shape: {counted(self._misfits, _LISTED, '; ')}{ignoring}": self._misfits,
            f"lacks weights of the model: {counted(missing, _LISTED)}{fix}": missing,
            f"has weights that the model does not have: {counted(self._unused, _LISTED)}{fix}": self._unused,
        }
        return [f"{self._option} {problem}" for problem, names in problems.items() if names]

    def _hint(self) -> str:
        """Suggest a map if the names differ by a prefix, and name the weights that differ with the map too.

        If the file contains adapters, suggest an export.
        """
        if any(".base_layer." in name for name in self._renamed):
            return "; the run has adapters: task=export writes a file in which they are merged into the weights"
        prefixes: Counter[str] = Counter()
        missing = [name for name in self._in_model if name not in self._renamed]
        unused = [name for name in self._renamed if name not in self._in_model]
        for name in missing:
            longer = [other[: -len(name)] for other in unused if other.endswith(f".{name}")]
            prefixes.update(f"^{prefix.replace('.', '[.]')}{ARROW}" for prefix in longer)
            prefixes.update(f"^{ARROW}{name[: -len(other)]}" for other in unused if name.endswith(f".{other}"))
        if not prefixes:
            return ""
        entry = prefixes.most_common(1)[0][0]
        pattern, replacement = entry.split(ARROW)
        names = {re.sub(pattern, replacement, name) for name in self._renamed}
        known = {alias for name in names for alias in self._aliases.get(name, ())}
        absent = [name for name in self._in_model if name not in known and not name.endswith(_DERIVED)]
        others = [f"leaves {counted(absent, _LISTED)} at their initial values"] if absent else []
        if unused := sorted(names - self._in_model.keys()):
            others.append(f"ignores {counted(unused, _LISTED)}")
        end = f" and init_from.strict=false, which {' and '.join(others)}" if others else ""
        return f"; try init_from.map='[\"{entry}\"]'{end}"

    def describe(self) -> list[str]:
        """Return lines for the run's header: which weights were loaded, and which were not."""
        counts = f"{len(self._loaded):,} of {len(self._in_model):,} weights"
        lines = [f"init     {self._path}, {counts}: {counted([*self._loaded], _LOGGED)}"]
        for problem, names in (
            ("not in the file, initial values kept", self._absent),
            ("of another shape, initial values kept", self._misfits),
            ("in the file, but not loaded", self._unused),
        ):
            if names:
                lines.append(f"         {problem}: {counted(names, _LOGGED, '; ')}")
        return lines

    def pending(self, module: nn.Module) -> list[Tensor]:
        """Return the tensors of the module that `fill` has not filled yet."""
        return [tensor for name, tensor in _named_tensors(module) if self._base_name(name) in self._pending]

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Copy the values of those tensors of the module that have memory and were not filled before."""
        for name, tensor in _named_tensors(module):
            base = self._base_name(name)
            if base in self._pending and not tensor.is_meta:
                tensor.copy_(self._file[self._pending.pop(base)].read())
        if not self._pending:
            self._file = {}  # closes it


def _named_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))


def _is_8_bit(dtype: torch.dtype) -> bool:
    """Return True for a floating-point dtype of 8 bits, whose values files store with separate scales."""
    return dtype.is_floating_point and dtype.itemsize == 1


def _describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return the shape and kind of a tensor, by which tensors of the file and of the model are compared."""
    return f"{list(shape)}{'' if dtype.is_floating_point else ' of integers'}"


def _rename(entries: Sequence[str], in_file: Iterable[str]) -> dict[str, str]:
    """Apply the entries to the file's names in order. Return the original names by the new, non-empty ones."""
    names = {name: name for name in in_file}
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
