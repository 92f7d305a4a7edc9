"""The parts of a model, and modules that are attached to be trained with it."""

import pytest
from torch import nn

from runner.training.model.submodules import attach_submodule, attached_loss, stages_or_children


def test_attached_submodules_are_not_children_of_the_model() -> None:
    model, loss = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 1)
    attach_submodule(model, "loss", loss)
    assert attached_loss(model) is loss
    assert stages_or_children(model) == [model[0]]
    assert "loss.weight" in dict(model.named_parameters())


def test_a_submodule_named_loss_is_not_the_attached_loss() -> None:
    model = nn.Sequential()
    model.add_module("loss", nn.Linear(2, 2))
    assert attached_loss(model) is None
    assert len(stages_or_children(model)) == 1
    with pytest.raises(ValueError, match="would become the model's loss, which exists"):
        attach_submodule(model, "loss", nn.Linear(2, 1))
