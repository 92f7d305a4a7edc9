"""Tests of checks that need no command."""

import pytest

from runner.config.schema import Config, apply_debug
from runner.config.validate import check_fit


@pytest.mark.parametrize("device_type", ["cpu", "cuda", None])
def test_custom_loader_without_the_builtin_options_is_accepted(device_type: str | None) -> None:
    config = Config(loader={"_target_": "mine.Loader", "size": 3}, debug=True)
    assert check_fit(config, device_type) == []
    assert apply_debug(config).loader == config.loader
