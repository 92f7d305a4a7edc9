"""Whether the checkpoint of a run is there, and whether the run can go on from it with what is typed now."""

from collections.abc import Mapping
from pathlib import Path

from runner.config.debugging import for_debugging
from runner.config.diagnostics.import_target import locate
from runner.config.diagnostics.type_hints import show
from runner.config.differences import refused_changes
from runner.config.recorded import read_choices
from runner.config.schema import Config
from runner.errors import InputError
from runner.runs.ledger import DONE
from runner.runs.manifest import newest_sound, verify
from runner.runs.run_directory import CHECKPOINTS, OVERRIDES, read_result
from runner.runs.shapes import read_words
from runner.runs.train_state import BEST, LAST, STEP, TrainState, available, named, read_train_state

_FORCE = "keep that, or add resume_force=true"


def check_resumable(config: Config, choices: Mapping[str, str | None]) -> list[str]:
    """Why the configuration cannot continue or read the run that it names, a message each.

    choices: the option taken of each group.
    """
    try:
        if config.resume:
            return _check_resumed(Path(config.resume), config, choices)
        if config.run and locate(config.task["_target_"]).reads_checkpoint:
            return _check_read(Path(config.run), config.checkpoint.load)
    except InputError as error:
        return error.messages
    return []


def _check_read(run: Path, name: str) -> list[str]:
    if not available(run / CHECKPOINTS):
        return [f"run={run} holds no checkpoint yet; train it first, without run="]
    if name not in (LAST, BEST) and not STEP.fullmatch(name):
        return []  # which is told already
    try:
        named(run / CHECKPOINTS, name)
    except ValueError as error:
        return [f"checkpoint={name}: {error}"]
    return []


def _check_resumed(run: Path, config: Config, choices: Mapping[str, str | None]) -> list[str]:
    refused = {} if config.resume_force else refused_changes(run, for_debugging(config))
    known = _recorded_choices(run) if refused else {}
    messages = []
    for key, (before, now) in refused.items():
        if key in known and choices.get(key) not in (None, known[key]):
            before, now = known[key], choices[key]
        messages.append(
            f"{key}={show(now)} cannot change when a run is resumed, which was made with {key}={show(before)}; {_FORCE}"
        )
    if (stopped := _newest_state(run)) is None:
        return messages + _check_begun_anew(run)
    if stopped.step_in_epoch and stopped.batch_size != config.batch_size and not config.resume_force:
        messages.append(
            f"batch_size={config.batch_size} cannot change in the middle of an epoch: the run stopped "
            f"{stopped.step_in_epoch} steps into one with batch_size={stopped.batch_size}; {_FORCE}"
        )
    if config.max_steps is not None and config.max_steps < stopped.step:
        messages.append(
            f"max_steps={config.max_steps} is below the {stopped.step} steps that the run has made; type at least "
            f"{stopped.step}, or max_steps=null"
        )
    epochs = stopped.epoch + (stopped.step_in_epoch > 0)
    if config.epochs < epochs:
        messages.append(
            f"epochs={config.epochs} is below the epoch that the run has come to, number {epochs}; type at least that"
        )
    return messages


def _recorded_choices(run: Path) -> dict[str, str]:
    """The options that the run is known to have taken: its result names some, and others were typed."""
    typed = [word.partition("=") for word in read_words(run / OVERRIDES)]
    return {group.lstrip("+"): option for group, _, option in typed} | read_choices(run)


def _check_begun_anew(run: Path) -> list[str]:
    """A run that was stopped before its first checkpoint begins at step 0; not one that has gone further."""
    result = read_result(run) or {}
    state = result.get("state")
    if state in DONE or (state == "preempted" and result.get("step")):
        return [f"resume={run} is {state} and holds no checkpoint any more; start anew, without resume="]
    return []


def _newest_state(run: Path) -> TrainState | None:
    """Where the run stands, by the newest sound checkpoint; None where there is no checkpoint.

    The large files' hashes are compared when it is loaded. Raises InputError where there are checkpoints, and none is
    sound.
    """
    newest, paths = newest_sound(run / CHECKPOINTS, shards=False), available(run / CHECKPOINTS)
    if newest is not None:
        return read_train_state(newest)
    if not paths:
        return None
    try:
        verify(paths[-1], shards=False)
    except ValueError as error:
        raise InputError(f"resume={run} holds no sound checkpoint: {error}") from None
    return read_train_state(paths[-1])  # which was being written a moment ago
