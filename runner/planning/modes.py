"""The plans of several modes, each with the configuration that the command would have in that mode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.config.compose import checked, compose, for_mode
from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.errors import InputError
from runner.input.datasets import load_data
from runner.input.source import Source
from runner.planning.cell import Cell, plan_cell
from runner.planning.costs import Costs, Device
from runner.records.run_directory import Request


@dataclass(frozen=True)
class ModeConfig:
    """The configuration of a mode, the chosen option of each group, and the overrides from which it is composed."""

    config: Config
    choices: Mapping[str, str]
    overrides: Sequence[str] = ()


def compose_modes(request: Request, modes: Sequence[str], dropped: Sequence[str]) -> dict[str, ModeConfig | InputError]:
    """Return the configuration of each mode, or the error with which the command line would refuse it.

    dropped: The top-level keys whose overrides are left out.
    """
    found: dict[str, ModeConfig | InputError] = {}
    for mode in modes:
        overrides = for_mode(request.overrides, request.choices["parallel"], mode, dropped)
        try:
            cfg = compose(overrides)
            found[mode] = ModeConfig(checked(cfg, overrides), dict(cfg.hydra.runtime.choices), overrides)
        except InputError as error:
            found[mode] = error
    return found


def plan_modes(modes: Mapping[str, ModeConfig | InputError], limits: Mapping[int, float], device: Device) -> list[Cell]:
    """Plan each mode at each world size.

    Args:
        modes: The result of compose_modes. A refused mode results in cells with the reason.
        limits: The memory of a rank in bytes, by world size.
        device: The data sheet from which times are estimated.
    """
    costs = dict[int, Costs]()
    data: list[tuple[Source, Source]] = []
    cells: list[Cell] = []
    for mode, composed in modes.items():
        try:
            if isinstance(composed, InputError):
                raise composed
            world = World(RankInfo(), None, as_backend(composed.config.backend))
            data = data or [load_data(composed.config, composed.choices, world)]
            costs = costs or {size: Costs(device, size, composed.config.threads) for size in limits}
        except InputError as error:
            cells += [Cell(mode, size, error.messages[0], is_refused=True) for size in limits]
            continue
        cells += [
            plan_cell(composed.config, composed.choices, data[0], mode, size, limit, costs[size])
            for size, limit in limits.items()
        ]
    return cells
