"""Construction of the optimizer, with the parameter groups that the configuration forms by parameter names."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from runner.config.diagnostics.import_target import locate
from runner.config.diagnostics.type_hints import show
from runner.config.instantiate import make_group
from runner.errors import InputError
from runner.optimization.optimizer_trial import seed_steps, try_updates
from runner.optimization.parameter_patterns import counted, first_match, names_of, near

DEFAULT = "default"  # the name of the group of the parameters that no pattern matches
TARGET = "_target_"  # a group with this key has an optimizer of its own
# Their update of a matrix depends on its rows and columns together; torch computes it wrongly, or fails, for shards.
NEED_WHOLE_MATRICES = (torch.optim.Adafactor, torch.optim.Muon)

Options = dict[str, Any]  # of a parameter group of torch, without its parameters
T = TypeVar("T", bound=torch.Tensor)


def try_options(node: Mapping[str, Any], choices: Mapping[str, str]) -> list[Options]:
    """Return the options of each parameter group, the default group first.

    They are tried with a dummy parameter. Raises InputError for an option that the constructor rejects, for one that
    cannot differ between groups, and for an optimizer that the runner cannot use.
    """
    (_, options), *nodes = _nodes(node)
    default = _try(choices, "optimizer", options)
    of_groups = []
    for (key, of_group), group in zip(nodes, node.get("groups", []), strict=True):
        unknown = [name for name in group if name not in ("match", *default)]
        if TARGET not in group and unknown:
            known = ", ".join(name for name in default if name in options)
            raise InputError(
                f"{key}.{unknown[0]}={show(group[unknown[0]])}: {node[TARGET]} has one {unknown[0]} for "
                f"all parameters; options that may differ between groups: {known}"
            )
        of_groups.append(_try({key: show(group)}, key, of_group))
    return [default, *of_groups]


def _nodes(node: Mapping[str, Any]) -> list[tuple[str, Options]]:
    """Return the key, and the class and options, of the optimizer of each parameter group, the default group first."""
    common = {name: value for name, value in node.items() if name != "groups"}
    nodes = [("optimizer", common)]
    for index, group in enumerate(node.get("groups", [])):
        own = {name: value for name, value in group.items() if name != "match"}
        nodes.append((f"optimizer.groups.{index}", own if TARGET in own else {**common, **own}))
    return nodes


class CombinedOptimizer(torch.optim.Optimizer):
    """The optimizers of separate parameter groups as one; `groups` are the same dicts that they have."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer], groups: list[dict[str, Any]]):
        super().__init__(groups, {})
        self._parts = parts
        for part in parts:
            self.state.update(part.state)  # some constructors create a state
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set a loaded state. torch passes new dicts for the parameter groups; the shared ones are updated instead."""
        groups = self.param_groups
        super().__setstate__(state)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups
        for part in self._parts:
            part.state = self.state


class OptimizerFactory:
    """Constructs the optimizer of any of a module's parameters, even after a mode has replaced or sharded them.

    The first parameter group has the parameters that no pattern matches; then follows one group for each pattern, in
    order. Groups without local parameters are kept, so that all ranks of a pipeline have equal groups. Frozen
    parameters are in no group. Raises InputError if a constructor rejects an option or a parameter, if an optimizer
    cannot update what a rank has, or if the group of a pattern would have no parameter.

    Args:
        shards: The ranks update shards of matrices.
        splits: An update cannot combine all parameters; see Parallel.splits_parameters.
        step_key: Returns the seed of the current step, which an optimizer that draws random numbers gets.

    Attributes:
        options: The options of each parameter group; `group` in a group of the optimizer is its index in this list.
        num_parameters: The number of trained parameters in each group, by its label.
    """

    def __init__(
        self,
        node: Mapping[str, Any],
        choices: Mapping[str, str],
        module: nn.Module,
        shards: bool = False,
        splits: bool = False,
        step_key: Callable[[], int] = lambda: 0,
    ):
        self._module, self._choices, self._nodes, self._step_key = module, choices, _nodes(node), step_key
        self.options = try_options(node, choices)
        groups: list[Mapping[str, Any]] = node.get("groups", [])
        self._optimizer_of = [index if TARGET in group else 0 for index, group in enumerate([{}, *groups])]
        patterns: list[str] = [group["match"] for group in groups]
        names = names_of([(n, p) for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad])
        if not names:
            raise InputError("model: no parameter has requires_grad, so that nothing can be trained")
        found = {aliases[0]: first_match(patterns, aliases) for aliases in names.values()}
        self._group_of = {name: 0 if match is None else match + 1 for name, match in found.items()}
        frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
        _check_matches(patterns, found, list(names.values()), frozen)
        self._check_parameters(shards)
        self._drawing = self._check_dependencies(shards, splits)
        labels = [DEFAULT, *(_label(index, group) for index, group in enumerate(groups))]
        self.num_parameters = dict.fromkeys(labels, 0)
        for parameter, aliases in names.items():
            self.num_parameters[labels[self._group_of[aliases[0]]]] += parameter.numel()
        if not self.num_parameters[DEFAULT]:
            del self.num_parameters[DEFAULT]

    def __call__(self, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the optimizer of some of the module's parameters, or of the groups of an existing optimizer."""
        given = list(parameters)
        if given and isinstance(given[0], dict):
            return self._make(given)  # type: ignore[arg-type]
        wanted = set(given)
        assert wanted <= set(self._module.parameters()), "parameters are grouped by their names in the module"
        groups: list[list[nn.Parameter]] = [[] for _ in self.options]
        for name, parameter in self._module.named_parameters():
            if parameter in wanted and parameter.requires_grad:
                groups[self._group_of[name]].append(parameter)
        return self._make(
            [
                {"params": parameters, **options, "group": index}
                for index, (options, group) in enumerate(zip(self.options, groups, strict=True))
                for parameters in by_mesh(group) or [[]]
            ]
        )

    def _make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        of_optimizer: dict[int, list[dict[str, Any]]] = {}
        for group in groups:
            of_optimizer.setdefault(self._optimizer_of[group["group"]], []).append(group)
        parts = [make_group(self._choices, *self._nodes[index], own) for index, own in of_optimizer.items()]
        for index, part in zip(of_optimizer, parts, strict=True):
            if index in self._drawing:
                seed_steps(part, self._step_key, self._first_of(part))
        return parts[0] if len(parts) == 1 else CombinedOptimizer(parts, groups)

    def _first_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of the optimizer's first parameter in the model, which differs between optimizers."""
        trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        return next((number for number, p in enumerate(self._module.parameters()) if p in trained), 0)

    def _check_dependencies(self, shards: bool, splits: bool) -> set[int]:
        """Return the indices of the custom optimizers that draw random numbers.

        Raise InputError if a rank cannot compute the updates, because it does not have all that they depend on.
        """
        mode, drawing = f"parallel={self._choices.get('parallel')}", set()
        for index in dict.fromkeys(self._optimizer_of):
            key, options = self._nodes[index]
            names = [name for name, group in self._group_of.items() if self._optimizer_of[group] == index]
            if not names or _is_of_torch(options):
                continue
            # Few steps of a small learning rate may not show a step size that is estimated from all parameters.
            larger = {"lr": 1.0} if "lr" in options else {}
            make = functools.partial(make_group, self._choices, key, {**options, **larger})
            depends = try_updates(make, [self._module.get_parameter(name).shape for name in names])
            if depends.on_draws:
                drawing.add(index)
            if depends.on_draws and (shards or splits):
                raise InputError(
                    f"{key}._target_={options[TARGET]} draws random numbers, which would differ under {mode}, because "
                    "each rank updates a part of the parameters; try parallel=ddp"
                )
            if depends.on_others and splits:
                raise InputError(
                    f"{key}._target_={options[TARGET]}: its update of a parameter depends on the other parameters, but "
                    f"{mode} spreads them unequally over the ranks; try parallel=ddp"
                )
        return drawing

    def _check_parameters(self, shards: bool) -> None:
        """Raise InputError if an optimizer rejects some of its parameters, or cannot update their shards."""

        @functools.cache  # many parameters have the same shape
        def reason(index: int, shape: torch.Size, dtype: torch.dtype) -> str:
            try:  # with one number that is expanded, because the parameter may be large
                _try(self._choices, *self._nodes[index], torch.zeros((), dtype=dtype).expand(shape))
            except InputError as error:
                return str(error)
            return ""

        for index, (key, options) in enumerate(self._nodes):
            parameters = {name: self._module.get_parameter(name) for name, of in self._group_of.items() if of == index}
            if parameters and shards and locate(options[TARGET]) in NEED_WHOLE_MATRICES:
                raise InputError(
                    f"{key}._target_={options[TARGET]} needs whole matrices, but parallel={self._choices['parallel']} "
                    "shards them; try parallel=ddp or parallel=zero"
                )
            for name, parameter in parameters.items():
                if parameter.is_complex() and self.options[index].get("fused"):  # torch refuses it in the first step
                    raise InputError(
                        f"{key}.fused=true: a fused update cannot change complex parameters, such as {name}; "
                        f"try {key}.fused=false"
                    )
            reasons = {name: reason(index, parameter.shape, parameter.dtype) for name, parameter in parameters.items()}
            if rejected := [name for name in reasons if reasons[name]]:
                raise InputError(
                    f"{reasons[rejected[0]]} ({counted(rejected)}); choose another optimizer for these parameters, as "
                    "in optimizer.groups=[{match: bias$, _target_: torch.optim.AdamW, lr: 0.001}]"
                )


def _is_of_torch(options: Options) -> bool:
    return getattr(locate(options[TARGET]), "__module__", "").startswith("torch.")


def _label(index: int, group: Mapping[str, Any]) -> str:
    """Return the name of a group in the header: its number, pattern and settings."""
    settings = ", ".join(f"{key}={value}" for key, value in group.items() if key != "match")
    return f"{index}: {group['match']} ({settings})"


def by_mesh(tensors: Iterable[T]) -> list[list[T]]:
    """Group the tensors by device mesh, because one foreach operator cannot combine meshes."""
    groups: dict[DeviceMesh | None, list[T]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def _try(choices: Mapping[str, str], key: str, options: Options, parameter: torch.Tensor | None = None) -> Options:
    """Construct the optimizer of a parameter, by default a dummy. Return all options, including the defaults."""
    optimizer = make_group(choices, key, options, [nn.Parameter(torch.zeros(2, 2) if parameter is None else parameter)])
    tried = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    if "lr" not in tried:
        raise InputError(f"{key}._target_={options[TARGET]} has no lr, which the schedule multiplies")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"{key}._target_={options[TARGET]} computes the loss several times per step, but a step of the runner "
            "computes it once; try optimizer=adam"
        )
    return tried


def _check_matches(
    patterns: Sequence[str], found: Mapping[str, int | None], names: Sequence[Sequence[str]], frozen: Sequence[str]
) -> None:
    """Raise InputError for a pattern that is not the first match of any parameter."""
    known = [name for aliases in names for name in aliases]
    for index, pattern in enumerate(patterns):
        if index in found.values():
            continue
        override = f"optimizer.groups.{index}.match={pattern}"
        if any(re.search(pattern, name) for name in [*known, *frozen]):
            raise InputError(f"{override}: all parameters that it matches are frozen or in an earlier group; remove it")
        raise InputError(f"{override} matches no parameter's name; {near(pattern, known)}")
