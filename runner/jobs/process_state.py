"""Process-wide state: reset before every job, and restored after a run for a script that has called the runner."""

import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from runner.distributed.failures.signals import STOP_SIGNALS
from runner.jobs.process_tuning import freeze_objects
from runner.process.cores import allowed_cores
from runner.process.freed_memory import return_freed_memory

LOGGERS = ("runner", "py.warnings", "torch.distributed.elastic", "torch.multiprocessing.spawn")
BY_AGENT = signal.SIGXCPU  # torch's elastic agent leaves a handler for it
_first: list[Callable[[], Any]] = []  # functions that restore the settings from before the first job


def reset_process(seed: int) -> None:
    """Seed the global random generators, and restore the settings that an earlier job has changed."""
    if not _first:
        _first.extend(_keep_settings())
    else:
        for restore in _first:
            restore()
        _freeze_imports()
        if compiler := sys.modules.get("torch._dynamo"):
            compiler.reset()  # drops code compiled for another model
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return_freed_memory()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident memory
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def choose_kernels(tf32: bool | str, cudnn_benchmark: bool) -> None:
    """Choose among the kernels of operators on GPUs, before the code of the model, which may choose others.

    tf32: for which fp32 operators TensorFloat-32 is used: all, none, or "convolutions", torch's default.
    """
    if tf32 != "convolutions":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = bool(tf32)
    if cudnn_benchmark:
        torch.backends.cudnn.benchmark = True


# Excludes the first job's imports from the garbage collection after each further job: saves 0.4 s of 0.9 s.
_freeze_imports = cache(freeze_objects)


def _keep_settings() -> list[Callable[[], Any]]:
    """Return functions that restore the settings that a model or a dataset may change."""
    deterministic = torch.get_deterministic_debug_mode()  # 1 warns, 2 raises
    kept: list[Callable[[], Any]] = [
        partial(torch.set_default_dtype, torch.get_default_dtype()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        partial(torch.use_deterministic_algorithms, deterministic > 0, warn_only=deterministic == 1),
    ]
    cudnn = torch.backends.cudnn
    kept += [partial(setattr, cudnn, name, getattr(cudnn, name)) for name in ("benchmark", "deterministic")]
    with suppress(RuntimeError):  # the caller has set different values for convolutions and RNNs
        kept.append(partial(setattr, cudnn, "allow_tf32", cudnn.allow_tf32))
    compiler = torch.compiler.config
    kept += [partial(setattr, compiler, "cache_key_tag", compiler.cache_key_tag)]
    return kept


@contextmanager
def embedded_run() -> Iterator[None]:
    """Give the process the state of a new command: torch's default settings, and another main module than the caller's.

    At the end random states, settings, threads, cores, environment, signal handlers and loggers are restored, and no
    started process remains. Call it in the main thread.
    """
    with ExitStack() as restored:
        _restore_python(restored)
        _restore_torch(restored)
        restored.enter_context(_without_processes())
        restored.enter_context(torch.inference_mode(False))
        restored.enter_context(torch.autocast("cpu", enabled=False))
        if torch.cuda.is_available():
            restored.enter_context(torch.autocast("cuda", enabled=False))
        if torch.get_default_device().type != "cpu":
            restored.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
        torch.backends.cudnn.allow_tf32 = True
        yield


def _restore_python(restored: ExitStack) -> None:
    restored.callback(os.environ.update, dict(os.environ))
    restored.callback(os.environ.clear)
    main: Any = sys.modules["__main__"]
    restored.callback(setattr, main, "__spec__", main.__spec__)
    main.__spec__ = ModuleSpec("runner.__main__", None)  # or the processes of ranks would run the caller's script again
    restored.callback(random.setstate, random.getstate())
    restored.callback(setattr, warnings, "showwarning", warnings.showwarning)
    if numpy := sys.modules.get("numpy"):
        restored.callback(numpy.random.set_state, numpy.random.get_state())
    for number in (*STOP_SIGNALS, BY_AGENT):
        if (handler := signal.getsignal(number)) is not None:  # None: not installed by Python, which cannot restore it
            restored.callback(signal.signal, number, handler)
    for logger in map(logging.getLogger, LOGGERS):
        restored.callback(logger.setLevel, logger.level)
        restored.callback(setattr, logger, "propagate", logger.propagate)
    if not gc.get_freeze_count():
        restored.callback(gc.unfreeze)  # the run froze the caller's objects too
    if hasattr(os, "sched_setaffinity"):
        restored.callback(os.sched_setaffinity, 0, allowed_cores())


def _restore_torch(restored: ExitStack) -> None:
    for restore in _keep_settings():
        restored.callback(restore)
    restored.callback(torch.set_num_threads, torch.get_num_threads())
    restored.callback(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_initialized():
        restored.callback(torch.cuda.set_device, torch.cuda.current_device())
        restored.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    else:
        restored.callback(torch.cuda.manual_seed_all, torch.initial_seed())  # as torch.manual_seed does


@contextmanager
def _without_processes() -> Iterator[None]:
    """Kill the processes that the run has started. A remaining fork server would keep its first environment."""
    server: Any = forkserver._forkserver  # multiprocessing has no public function to stop it
    before = multiprocessing.active_children()
    was_running = server._forkserver_pid is not None
    try:
        yield
    finally:
        for process in multiprocessing.active_children():
            if process not in before:
                process.kill()
                process.join()
        if not was_running and server._forkserver_pid is not None:
            os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()
