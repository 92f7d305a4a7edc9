"""Reference runs of one process, shared by the tests of this directory."""

import functools
from collections.abc import Callable

import pytest
from worlds import Run, run


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Run the overrides in one process, once for all tests. Tests must not resume such a run in its directory."""
    return functools.cache(lambda *overrides: run(tmp_path_factory.mktemp("one_process"), 1, *overrides))
