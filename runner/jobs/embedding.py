"""A run in the process of a caller's script or notebook, whose state is restored afterwards."""

import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver
from typing import Any

import torch

from runner.distributed.failures.signals import STOP_SIGNALS
from runner.distributed.machine import allowed_cores
from runner.jobs.process_state import keep_settings, use_default_settings

LOGGERS = ("runner", "py.warnings", "torch.distributed.elastic", "torch.multiprocessing.spawn")
BY_AGENT = signal.SIGXCPU  # torch's elastic agent leaves a handler for it


@contextmanager
def embedded_run() -> Iterator[None]:
    """Give the process the state of a new command: torch's default settings, and no main module of the caller's.

    At the end random states, settings, threads, cores, environment, signal handlers and loggers are restored, and no
    started process remains. For the main thread.
    """
    with ExitStack() as restored:
        _restore_python(restored)
        _restore_torch(restored)
        restored.enter_context(_without_main())
        restored.enter_context(_without_processes())
        restored.enter_context(torch.inference_mode(False))
        restored.enter_context(torch.autocast("cpu", enabled=False))
        if torch.cuda.is_available():
            restored.enter_context(torch.autocast("cuda", enabled=False))
        if torch.get_default_device().type != "cpu":
            restored.enter_context(torch.device("cpu"))
        use_default_settings()
        yield


def _restore_python(restored: ExitStack) -> None:
    restored.callback(_set_environment, dict(os.environ))
    restored.callback(random.setstate, random.getstate())
    restored.callback(setattr, warnings, "showwarning", warnings.showwarning)
    if numpy := sys.modules.get("numpy"):
        restored.callback(numpy.random.set_state, numpy.random.get_state())
    for number in (*STOP_SIGNALS, BY_AGENT):
        if (handler := signal.getsignal(number)) is not None:  # None: not installed by Python, which cannot restore it
            restored.callback(signal.signal, number, handler)
    for logger in map(logging.getLogger, LOGGERS):
        restored.callback(logger.manager._clear_cache)  # type: ignore[attr-defined]  # of the levels for which loggers are enabled
        for name in ("level", "propagate"):
            restored.callback(setattr, logger, name, getattr(logger, name))
    if not gc.get_freeze_count():
        restored.callback(gc.unfreeze)  # the run froze the caller's objects too
    if hasattr(os, "sched_setaffinity"):
        restored.callback(os.sched_setaffinity, 0, allowed_cores())


def _restore_torch(restored: ExitStack) -> None:
    for restore in keep_settings():
        restored.callback(restore)
    restored.callback(torch.set_rng_state, torch.get_rng_state())
    restored.callback(torch.set_num_threads, torch.get_num_threads())
    if torch.cuda.is_initialized():
        restored.callback(torch.cuda.set_device, torch.cuda.current_device())
        restored.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    else:
        restored.callback(torch.cuda.manual_seed_all, torch.initial_seed())  # as torch.manual_seed does
    restored.callback(_empty_cache)


def _empty_cache() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep processes of multiprocessing from running the caller's script again: ranks need nothing from it."""
    main: Any = sys.modules["__main__"]
    before = main.__spec__
    main.__spec__ = ModuleSpec("runner.__main__", None)  # multiprocessing imports nothing for a package's __main__
    try:
        yield
    finally:
        main.__spec__ = before


@contextmanager
def _without_processes() -> Iterator[None]:
    """Kill the processes that the run has started. A fork server that remained would keep its first environment."""
    server: Any = forkserver._forkserver  # it has no public function to stop it
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
            with suppress(ProcessLookupError):
                os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()


def _set_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})
