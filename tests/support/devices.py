"""The option --device, a plugin: `cuda` runs on a GPU the jobs of all tests that call `worlds.run` or `run_world`.

Ranks are forked, and a process cannot use a GPU if its parent did, or if its parent ran a backward while it saw one. So
each of these tests runs in a fork of pytest's process, and with `cpu` no test sees a GPU.
"""

import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType

import pytest
import torch
import worlds
from _pytest.runner import runtestprotocol

PROCESSES = ("commands", "faults", "launchers", "remote")  # their tests are about processes and files
# Equal runs must have equal bits: cuBLAS needs its own workspaces for that, and TF32 differs from the CPU.
REPRODUCIBLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVIDIA_TF32_OVERRIDE": "0"}


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "where jobs of tests run: cpu (default), or cuda, which selects the tests of jobs and those marked gpu"
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help=what)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu(reason): is about CPUs; --device cuda skips the test, with the reason")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # otherwise, counting GPUs would be a use of them
    count = torch.cuda.device_count()
    if config.getoption("--device") == "cuda":
        if not count:
            raise pytest.UsageError("--device cuda needs a GPU, and torch finds none here")
        worlds.DEVICE = "cuda"
        config.pluginmanager.register(OnGpu(), "tests on a GPU")
        return
    if count:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # The first backward of a process decides how many threads autograd starts. So run it before any test enters a
    # FakeTensorMode, in which torch counts a GPU that does not exist.
    torch.ones((), requires_grad=True).backward()


class OnGpu:
    """Selects the tests that can run on a GPU, and runs each in a process of its own."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        selected = [
            item
            for item in items
            if item.get_closest_marker("gpu") or (runs_a_job(item) and item.path.parent.name not in PROCESSES)
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(selected)])
        items[:] = selected
        for item in items:
            if (mark := item.get_closest_marker("cpu")) is not None:
                item.add_marker(pytest.mark.skip(reason=f"is about CPUs: {mark.args[0]}"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports_of_fork(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


def reports_of_fork(item: pytest.Item) -> list[pytest.TestReport]:
    """Run a test with all its fixtures in a forked process, and return its reports."""
    hook = item.config.hook
    item.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # otherwise, each fork creates one
    with tempfile.TemporaryFile() as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        if (pid := os.fork()) == 0:
            try:
                if not item.get_closest_marker("gpu"):
                    os.environ.update(REPRODUCIBLE)
                reports = runtestprotocol(item, nextitem=None, log=False)
                pickle.dump([hook.pytest_report_to_serializable(config=item.config, report=r) for r in reports], file)
                file.flush()
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        file.seek(0)
        if status:
            text = f"the process of the test ended with status {status}"
            return [pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")]
        return [hook.pytest_report_from_serializable(config=item.config, data=data) for data in pickle.load(file)]


def runs_a_job(item: pytest.Item) -> bool:
    """Return True if the test or one of its fixtures calls `worlds.run_world`, directly or through other functions."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    functions = [item.function, *(each.func for fixture in fixtures for each in fixture)]  # type: ignore[attr-defined]
    return any(calls(function, worlds.run_world, set()) for function in functions)


def calls(function: Callable[..., object], target: Callable[..., object], seen: set[object]) -> bool:
    """Return True if a function of the tests names `target`, or another function of the tests that does."""
    function = getattr(function, "__wrapped__", function)
    if function is target:
        return True
    if not isinstance(function, FunctionType) or function in seen or "/tests/" not in function.__code__.co_filename:
        return False
    seen.add(function)
    named = [function.__globals__.get(name) for name in names_in(function.__code__)]
    return any(callable(each) and calls(each, target, seen) for each in named)


def names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
