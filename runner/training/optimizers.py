"""Makes the optimizer of a model's parameters, in the groups that the configuration forms by their names."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from runner.config.diagnostics.type_hints import show
from runner.config.instantiate import make_group
from runner.errors import InputError
from runner.training.names import first_match, listed, names_of, near

DEFAULT = "default"  # what the group is called whose parameters no pattern matches

Options = dict[str, Any]  # of a parameter group, as torch has them: all but the parameters


class OptimizerTrial:
    """The optimizer's class with the options of each group, tried on a parameter of its own.

    Raises InputError for what the constructor refuses, and for options that it does not take by groups.
    """

    def __init__(self, node: Mapping[str, Any], choices: Mapping[str, str]):
        options = dict(node)
        groups: list[dict[str, Any]] = options.pop("groups", [])
        self.make: Callable[..., torch.optim.Optimizer] = functools.partial(make_group, choices, "optimizer", options)
        self.default = _options_of(self.make(_parameters_to_try()))
        if "lr" not in self.default:
            raise InputError(
                f"optimizer._target_={node['_target_']}: its parameter groups have no lr, which the schedule of the "
                "learning rate multiplies; choose one that has"
            )
        self.patterns: list[str] = [group["match"] for group in groups]
        self.of_groups: list[Options] = []
        for index, group in enumerate(groups):
            key, own = f"optimizer.groups.{index}", {name: group[name] for name in group if name != "match"}
            if strange := [name for name in own if name not in self.default]:
                known = ", ".join(name for name in self.default if name in options)
                raise InputError(
                    f"{key}.{strange[0]}={show(own[strange[0]])}: {node['_target_']} has one {strange[0]} for all "
                    f"parameters; what differs by group is among: {known}"
                )
            tried = make_group({key: show(group)}, key, {**options, **own}, _parameters_to_try())
            self.of_groups.append(_options_of(tried))


class OptimizerFactory:
    """Makes the optimizer of any of a module's parameters, whatever a mode has made of these by then.

    The parameter groups are that of the parameters which no pattern matches, and one for each pattern in their order;
    one that has no parameters here is there too, so that all ranks of a pipeline have the same. A group is cut where
    parameters lie on several meshes, because one foreach operator takes no others together. Frozen parameters are in
    no group. Raises InputError for a pattern that leaves its group without a parameter of the module.
    """

    def __init__(self, node: Mapping[str, Any], choices: Mapping[str, str], module: nn.Module):
        trial = OptimizerTrial(node, choices)
        self._make, self._module = trial.make, module
        self._options = [trial.default, *trial.of_groups]
        names = names_of([(n, p) for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad])
        if not names:
            raise InputError("model: no parameter has requires_grad, so that nothing can be trained; leave some on")
        found = {aliases[0]: first_match(trial.patterns, aliases) for aliases in names.values()}
        self._group_of = {name: 0 if match is None else match + 1 for name, match in found.items()}
        frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
        _check_matches(trial.patterns, found, list(names.values()), frozen)
        labels = [DEFAULT, *map(_label, range(len(trial.patterns)), trial.patterns)]
        sizes = Counter({label: 0 for label in labels if label != DEFAULT})
        for parameter, aliases in names.items():
            sizes[labels[self._group_of[aliases[0]]]] += parameter.numel()
        self.num_parameters = {
            label: sizes[label] for label in labels if label in sizes
        }  # of each group's trained ones

    def __call__(self, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer of some of the module's parameters, or of groups of an optimizer that was made here."""
        given = list(parameters)
        if given and isinstance(given[0], dict):
            return self._make(given)
        wanted = set(given)
        assert wanted <= set(self._module.parameters()), "a parameter has a name in the module, by which it is grouped"
        groups: list[list[nn.Parameter]] = [[] for _ in self._options]
        for name, parameter in self._module.named_parameters():
            if parameter in wanted and parameter.requires_grad:
                groups[self._group_of[name]].append(parameter)
        return self._make(
            [
                {"params": part, **options, "group": index}
                for index, (options, group) in enumerate(zip(self._options, groups, strict=True))
                for part in by_mesh(group) or [[]]
            ]
        )


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in lists of one mesh each, or of none: one foreach operator takes no others together."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def _parameters_to_try() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, 2))]


def _options_of(optimizer: torch.optim.Optimizer) -> Options:
    return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}


def _label(index: int, pattern: str) -> str:
    return f"{index} ({pattern})"


def _check_matches(
    patterns: Sequence[str], found: Mapping[str, int | None], names: Sequence[Sequence[str]], frozen: Sequence[str]
) -> None:
    """Raises InputError for a pattern that is no parameter's first."""
    known = [name for aliases in names for name in aliases]
    for index, pattern in enumerate(patterns):
        if index in found.values():
            continue
        typed = f"optimizer.groups.{index}.match={pattern}"
        matched = [aliases[0] for aliases in names if any(re.search(pattern, name) for name in aliases)]
        if matched:
            earlier = found[matched[0]]
            raise InputError(
                f"{typed}: all that it matches ({listed(matched)}) is in an earlier group already, by "
                f"optimizer.groups.{earlier}.match={patterns[earlier or 0]}; put it before that one, or leave it out"
            )
        if still := [name for name in frozen if re.search(pattern, name)]:
            raise InputError(f"{typed} matches only parameters that are not trained ({listed(still)}); leave it out")
        raise InputError(f"{typed} matches no parameter's name; {near(pattern, known)}")
