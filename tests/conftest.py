"""Fixtures that several test modules share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Commands


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Commands that run in the test's own folder. What is left of them at its end is killed."""
    own = Commands(tmp_path)
    yield own
    for process in own.started:
        own.kill(process)
        assert process.stdout and process.stderr
        process.stdout.close()
        process.stderr.close()
