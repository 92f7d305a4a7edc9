"""Every job finds the process as the first one did: nothing that an earlier job of a sweep has set reaches it."""

import random
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from runner.launchers.freed_memory import give_back_freed_memory
from runner.launchers.imported import set_aside

_first: list[Callable[[], Any]] = []  # what sets the process back to how it was before its first job


def reset_process(seed: int) -> None:
    """Seed every generator, and undo what an earlier job has set for the whole process."""
    if not _first:
        _first.extend(keep_settings())
    else:
        for set_back in _first:
            set_back()
        _set_imports_aside()
        if compiler := sys.modules.get("torch._dynamo"):
            compiler.reset()  # code compiled for another model
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        give_back_freed_memory()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far starts anew
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@cache
def _set_imports_aside() -> None:
    """What the first job has imported need not be searched when each of the next is cleared away: 0.4 s of 0.9."""
    set_aside()


def use_default_settings() -> None:
    """Set all that `keep_settings` keeps to what torch begins with."""
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
    for hooks in _global_hooks():
        hooks.clear()


def keep_settings() -> list[Callable[[], Any]]:
    """What sets back all that a model or a data set may have set for the whole process."""
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    kept: list[Callable[[], Any]] = [
        partial(torch.set_default_dtype, torch.get_default_dtype()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        partial(torch.use_deterministic_algorithms, deterministic, warn_only=warn_only),
    ]
    cudnn = torch.backends.cudnn
    kept += [partial(setattr, cudnn, name, getattr(cudnn, name)) for name in ("benchmark", "deterministic")]
    return kept + [partial(_refill, hooks, dict(hooks)) for hooks in _global_hooks()]


def _global_hooks() -> list[dict[int, Any]]:
    """Those of all modules of the process."""
    of_torch = vars(torch.nn.modules.module).items()
    return [hooks for name, hooks in of_torch if name.startswith("_global_") and isinstance(hooks, dict)]


def _refill(hooks: dict[int, Any], before: dict[int, Any]) -> None:
    hooks.clear()
    hooks.update(before)
