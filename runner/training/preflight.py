"""Dry runs of model, data and objective before the run: what a mode must know of a forward, and what it may not do."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from runner.config.schema import Config
from runner.distributed.world import World
from runner.errors import InputError
from runner.input.batch import MicroBatch
from runner.input.source import Source
from runner.objectives.objective import Objective
from runner.training.draws.following import Draws
from runner.training.draws.observed_draws import observe_draws
from runner.training.dry_run import DryRun, check_training, dry_run
from runner.training.mode import Parallel
from runner.training.model.forward_calls import record_calls
from runner.training.model.forward_state import restoring_all
from runner.training.sample_comparison import compare_samples
from runner.training.state_check import StateOfForward, find_state


@dataclass(frozen=True)
class Findings:
    """What the dry runs have found; the defaults are those of an imagined world, in which no values are computed.

    Attributes:
        forward: The result of the objective for a sample or two.
        draws: The random numbers that follow the samples.
        replaced: Names of the trained parameters that the forward replaces by others.
        state: What the forward changes in training.
        warnings: Lines for the header.
    """

    forward: DryRun
    draws: Draws
    replaced: list[str] = field(default_factory=list)
    state: StateOfForward = field(default_factory=StateOfForward)
    warnings: list[str] = field(default_factory=list)

    def refuse_writes(self, choices: Mapping[str, str], parallel: Parallel, world: World) -> None:
        """Raise InputError if the forward changes trained parameters in a way that the mode cannot support."""
        if self.replaced:
            raise InputError(
                f"model={choices['model']}: its forward replaces the parameter {self.replaced[0]}, which the optimizer "
                "would not update; change the parameter in place"
            )
        if self.forward.written and (world.world_size > 1 or parallel.needs_group):
            raise InputError(
                f"parallel={choices['parallel']}: the forward of model={choices['model']} changes "
                f"{self.forward.written[0]} in place, and each rank would change its copy by its own samples; compute "
                "a new tensor from the parameter, or try parallel=none with one process"
            )


def run_dry(
    config: Config,
    choices: Mapping[str, str],
    module: nn.Module,
    objective: Objective,
    source: Source,
    sample: MicroBatch,
    parallel: Parallel,
    world: World,
    trains: bool,
) -> Findings:
    """Run the objective on the first samples on the CPU. The state of model, objective and generators is restored.

    `sample` is the batch of the first run. With `trains`, check training, too. Raises InputError if the components do
    not fit each other.
    """
    with restoring_all(module, objective):
        forward = dry_run(config, choices, module, objective, sample, ragged=hasattr(source, "collate"))
        record_calls(config, choices, module, objective, source, parallel)
    draws = Draws(world.device)
    if world.is_imagined:
        return Findings(forward, draws)
    state = find_state(config, module, objective, source)
    # Forward cannot write to the placeholder of a parameter, and modes that need placeholders refuse such a model.
    if trains and not (state.parameters and parallel.meta_init):
        check_training(config, choices, module, objective, source)
    warnings, replaced = observe_draws(config, choices, module, objective, source, draws)
    warnings += compare_samples(config, choices, module, objective, source, draws)
    return Findings(forward, draws, replaced, state, warnings)
