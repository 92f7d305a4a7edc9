"""Dry runs of model, data and objective before the run: what a mode must know of a forward, and what it may not do."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from runner.distributed.sync_batch_norm import RecordBatchNorm
from runner.distributed.world import World
from runner.errors import InputError, failed_with
from runner.optimization.parameter_patterns import counted
from runner.training.components import Components
from runner.training.cuda_graph import OFF, Repeatable
from runner.training.draws.following import Draws
from runner.training.draws.observed_draws import observe_draws
from runner.training.dry_run import DryRun, check_training, dry_run
from runner.training.mode import Parallel
from runner.training.model.adapters import recording_calls, warn_of_uncalled
from runner.training.model.forward_calls import find_divided
from runner.training.model.forward_state import restoring_all
from runner.training.model.submodules import mark_as_divided
from runner.training.sample_comparison import compare_samples
from runner.training.slice_check import check_draws
from runner.training.state_check import StateOfForward, find_state


@dataclass
class Findings:
    """What the dry runs have found; the defaults are those of a plan, in which no values are computed.

    Attributes:
        forward: The result of the objective for a sample or two.
        draws: The random numbers that follow the samples.
        replaced: Names of the trained parameters that the forward replaces by others.
        state: What the forward changes in training.
        needs_two: In training, BatchNorm gets one value per channel from a sample, and therefore needs two samples.
        warnings: Lines for the header.
    """

    forward: DryRun
    draws: Draws = field(default_factory=Draws)
    replaced: list[str] = field(default_factory=list)
    state: StateOfForward = field(default_factory=StateOfForward)
    needs_two: bool = False
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


def run_forward(components: Components, recomputes: bool) -> Findings:
    """Run the objective on the first samples on the CPU, in evaluation: all that can be done without values of tensors.

    recomputes: activations are recomputed. The state of model, objective and generators is restored. Raises InputError
    if the components do not fit each other.
    """
    with RecordBatchNorm():
        return _run_forward(components, recomputes)


def run_dry(components: Components, recomputes: bool, compiles: bool | str, trains: bool) -> Findings:
    """Do the same as `run_forward`, and find out what depends on the values of tensors, with `trains` also in training.

    compiles: the key `compile`.
    """
    with RecordBatchNorm(), recording_calls() as called:
        found = _run_forward(components, recomputes)
        found.state = find_state(components)
        # Forward cannot write to the placeholder of a parameter, and modes that need placeholders refuse such a model.
        if trains and not (found.state.parameters and components.model.deferred):
            found.needs_two = check_training(components)
        found.warnings, found.replaced = observe_draws(components, compiles, found.draws)
        if components.parallel.resolved_axes.sequence > 1:
            check_draws(components, found.draws, found.warnings, found.forward.prediction.outputs.size(1))
        if trains and components.parallel.captures:
            _check_capture(components, found)
        found.warnings += compare_samples(components, found.draws)
        found.warnings += warn_of_uncalled(components.module, called)
        if found.forward.class_hint:
            found.warnings.append(
                "loss=auto: the targets are whole numbers in floating point, so the loss is mse; if they are classes, "
                f"{found.forward.class_hint}; if they are not, set loss=mse"
            )
    return found


def _check_capture(components: Components, found: Findings) -> None:
    """Raise InputError if a CUDA graph cannot repeat the training passes of these components."""
    module, objective, draws, problems = components.module, components.objective, found.draws, list[str]()
    if attributes := [*found.state.attributes, *found.state.of_objective]:
        problems.append(f"forward changes the attribute {counted(attributes, 3)}")
    if len(objective.losses) > 1 or objective.value_names:
        problems.append("the objective has several losses, terms or logged values")
    if draws.recomputes:
        problems.append("the model calls torch.utils.checkpoint around random functions")
    if draws.follows and draws.common:
        problems.append("the model draws random numbers that all samples share")
    with restoring_all(module, objective):
        try:
            with Repeatable():
                objective.measure(module, next(iter(objective.losses)), components.samples.batch([0, 0]))
        except RuntimeError as error:
            problems.append(f"a step cannot be captured in a CUDA graph{failed_with(error)}")
    if problems:
        raise InputError(*(f"cuda_graph=true: {problem}; {OFF}" for problem in problems))


def _run_forward(components: Components, recomputes: bool) -> Findings:
    parallel, divided = components.parallel, list[nn.Module]()
    with restoring_all(components.module, components.objective):
        forward = dry_run(components)
        if parallel.shards_matrices or parallel.meta_init or recomputes:  # others treat the model as a whole
            divided = find_divided(components)
    mark_as_divided(divided)  # now, because attributes have been restored
    return Findings(forward)
