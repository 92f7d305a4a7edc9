"""Paths of classes that have moved."""

import importlib

import pytest

from runner.config import renamed_targets
from runner.config.renamed_targets import rename_targets


def test_targets_are_renamed_wherever_they_stand() -> None:
    node = {
        "_target_": "runner.schedules.Cosine",
        "nested": [{"_target_": "runner.losses.Auto"}, {"name": "runner.losses.Auto"}],
        "loader._target_": "runner.loader.Loader",
        "other": {"_target_": "torch.optim.SGD", "text": "runner.loader.Loader"},
        "none": {"_target_": None},
    }
    assert rename_targets(node) == {
        "_target_": "runner.training.lr_schedules.Cosine",
        "nested": [{"_target_": "runner.training.losses.Auto"}, {"name": "runner.losses.Auto"}],
        "loader._target_": "runner.training.loader.Loader",
        "other": {"_target_": "torch.optim.SGD", "text": "runner.loader.Loader"},
        "none": {"_target_": None},
    }


@pytest.mark.parametrize(("before", "now"), renamed_targets._MODULES.items())
def test_they_have_moved_to_modules_that_are_there(before: str, now: str) -> None:
    importlib.import_module(now)
    if before not in now:  # a package of the same name may be there today
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(before)
