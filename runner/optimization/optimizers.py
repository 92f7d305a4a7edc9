"""Construction of the optimizer, with the parameter groups that the configuration forms by parameter names."""

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from runner.config.diagnostics.type_hints import show
from runner.config.instantiate import make_group
from runner.errors import InputError
from runner.optimization.parameter_patterns import first_match, names_of, near

DEFAULT = "default"  # the name of the group of the parameters that no pattern matches

Options = dict[str, Any]  # of a parameter group of torch, without its parameters


def try_options(node: Mapping[str, Any], choices: Mapping[str, str]) -> list[Options]:
    """Return the options of each parameter group, the default group first.

    They are tried with a dummy parameter. Raises InputError for an option that the constructor rejects, and for one
    that cannot differ between groups.
    """
    options = {name: value for name, value in node.items() if name != "groups"}
    default = _try(choices, "optimizer", options)
    if "lr" not in default:
        raise InputError(f"optimizer._target_={node['_target_']} has no lr, which the schedule multiplies")
    of_groups = []
    for index, group in enumerate(node.get("groups", [])):
        key = f"optimizer.groups.{index}"
        overrides = {name: value for name, value in group.items() if name != "match"}
        if unknown := [name for name in overrides if name not in default]:
            known = ", ".join(name for name in default if name in options)
            raise InputError(
                f"{key}.{unknown[0]}={show(overrides[unknown[0]])}: {node['_target_']} has one {unknown[0]} for "
                f"all parameters; options that may differ between groups: {known}"
            )
        of_groups.append(_try({key: show(group)}, key, {**options, **overrides}))
    return [default, *of_groups]


class OptimizerFactory:
    """Constructs the optimizer of any of a module's parameters, even after a mode has replaced or sharded them.

    The first parameter group has the parameters that no pattern matches; then follows one group for each pattern, in
    order. Groups without local parameters are kept, so that all ranks of a pipeline have equal groups. A group is
    split by device mesh, because one foreach operator cannot combine meshes. Frozen parameters are in no group.

    Attributes:
        num_parameters: Number of trained parameters in each group, by the group's label.

    Raises:
        InputError: The constructor rejects an option, or the group of a pattern would have no parameter.
    """

    def __init__(self, node: Mapping[str, Any], choices: Mapping[str, str], module: nn.Module):
        options = {name: value for name, value in node.items() if name != "groups"}
        self._make = functools.partial(make_group, choices, "optimizer", options)
        self._module = module
        self._options = try_options(node, choices)
        patterns: list[str] = [group["match"] for group in node.get("groups", [])]
        names = names_of([(n, p) for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad])
        if not names:
            raise InputError("model: no parameter has requires_grad, so that nothing can be trained")
        found = {aliases[0]: first_match(patterns, aliases) for aliases in names.values()}
        self._group_of = {name: 0 if match is None else match + 1 for name, match in found.items()}
        frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
        _check_matches(patterns, found, list(names.values()), frozen)
        labels = [DEFAULT, *(_label(index, group) for index, group in enumerate(node.get("groups", [])))]
        sizes = Counter({label: 0 for label in labels if label != DEFAULT})
        for parameter, aliases in names.items():
            sizes[labels[self._group_of[aliases[0]]]] += parameter.numel()
        self.num_parameters = {label: sizes[label] for label in labels if label in sizes}

    def __call__(self, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the optimizer of some of the module's parameters, or of the groups of an existing optimizer."""
        given = list(parameters)
        if given and isinstance(given[0], dict):
            return self._make(given)
        wanted = set(given)
        assert wanted <= set(self._module.parameters()), "parameters are grouped by their names in the module"
        groups: list[list[nn.Parameter]] = [[] for _ in self._options]
        for name, parameter in self._module.named_parameters():
            if parameter in wanted and parameter.requires_grad:
                groups[self._group_of[name]].append(parameter)
        return self._make(
            [
                {"params": parameters, **options, "group": index}
                for index, (options, group) in enumerate(zip(self._options, groups, strict=True))
                for parameters in by_mesh(group) or [[]]
            ]
        )


def _label(index: int, group: Mapping[str, Any]) -> str:
    """Return the name of a group in the header: its number, pattern and settings."""
    settings = ", ".join(f"{key}={value}" for key, value in group.items() if key != "match")
    return f"{index}: {group['match']} ({settings})"


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group the parameters by device mesh, because one foreach operator cannot combine meshes."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def _try(choices: Mapping[str, str], key: str, options: Options) -> Options:
    """Construct the optimizer of a dummy parameter with these options. Return all options, including the defaults."""
    optimizer = make_group(choices, key, options, [nn.Parameter(torch.zeros(2, 2))])
    return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}


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
