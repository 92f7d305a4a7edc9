"""A run in somebody else's process, a script's or a notebook's: afterwards that is as it was before."""

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
from functools import partial
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver
from typing import Any

import torch

from runner.distributed.cpu_affinity import allowed_cores
from runner.distributed.signals import ASKING
from runner.launchers.process_state import keep_settings, use_default_settings

LOGGERS = ("runner", "py.warnings", "torch.distributed.elastic")
BY_AGENT = signal.SIGXCPU  # for which torchrun's agent leaves a handler behind


@contextmanager
def being_guest() -> Iterator[None]:
    """Meanwhile the process is as a command finds it: torch's default settings, and no main module of the caller's.

    Random states, settings, threads, cores, environment, handlers of signals and loggers are the caller's again at the
    end, and no process is left. For the main thread.
    """
    with ExitStack() as back:
        for set_back in (*_of_python(), *_of_torch()):
            back.callback(set_back)
        back.enter_context(_without_main())
        back.enter_context(_without_processes())
        back.enter_context(torch.inference_mode(False))
        back.enter_context(torch.autocast("cpu", enabled=False))
        if torch.cuda.is_available():
            back.enter_context(torch.autocast("cuda", enabled=False))
        if torch.get_default_device().type != "cpu":
            back.enter_context(torch.device("cpu"))
        use_default_settings()
        yield


def _of_python() -> list[Callable[[], Any]]:
    kept: list[Callable[[], Any]] = [
        partial(_set_environment, dict(os.environ)),
        partial(random.setstate, random.getstate()),
        partial(setattr, warnings, "showwarning", warnings.showwarning),
    ]
    if numpy := sys.modules.get("numpy"):
        kept.append(partial(numpy.random.set_state, numpy.random.get_state()))
    for number in (*ASKING, BY_AGENT):
        if (handler := signal.getsignal(number)) is not None:  # None: not one of Python's, nor to be set by it
            kept.append(partial(signal.signal, number, handler))
    for logger in map(logging.getLogger, LOGGERS):
        kept += [partial(setattr, logger, name, getattr(logger, name)) for name in ("level", "propagate")]
        kept.append(logger.manager._clear_cache)  # type: ignore[attr-defined]  # of who is enabled for which level
    if not gc.get_freeze_count():
        kept.append(gc.unfreeze)  # the caller's objects too were set aside
    if hasattr(os, "sched_setaffinity"):
        kept.append(partial(os.sched_setaffinity, 0, allowed_cores()))
    return kept


def _of_torch() -> list[Callable[[], Any]]:
    kept: list[Callable[[], Any]] = [
        *keep_settings(),
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(torch.set_num_threads, torch.get_num_threads()),
    ]
    if torch.cuda.is_initialized():
        kept.append(partial(torch.cuda.set_device, torch.cuda.current_device()))
        kept.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    else:
        kept.append(partial(torch.cuda.manual_seed_all, torch.initial_seed()))  # as torch.manual_seed has before
    kept.append(_empty_cache)
    return kept


def _empty_cache() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def _without_main() -> Iterator[None]:
    """What multiprocessing starts does not run the caller's script a second time: ranks need nothing of it."""
    main: Any = sys.modules["__main__"]
    before = main.__spec__
    main.__spec__ = ModuleSpec("runner.__main__", None)  # of a package's __main__ it imports nothing
    try:
        yield
    finally:
        main.__spec__ = before


@contextmanager
def _without_processes() -> Iterator[None]:
    """End what was started meanwhile, the fork server too: one that stays has the environment of its first day."""
    server: Any = forkserver._forkserver  # which has no public end
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
