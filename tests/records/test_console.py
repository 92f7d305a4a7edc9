"""The log of a run on the terminal."""

from pathlib import Path

import pytest

from runner.records.console import LOGGER, logging_to


def test_messages_are_printed_literally(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rich would replace :100: by an emoji and remove [bold]."""
    with logging_to(0, tmp_path):
        LOGGER.warning("model.py:100: [bold]")
    assert capsys.readouterr().out == "warning: model.py:100: [bold]\n"
