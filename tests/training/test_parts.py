"""What belongs to a model, and what was attached to it so that it is trained with it."""

import pytest
from torch import nn

from runner.training.parts import attach_part, attached_loss, stages_or_children


def test_what_is_attached_is_no_part_of_the_model() -> None:
    model, loss = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 1)
    attach_part(model, "loss", loss)
    assert attached_loss(model) is loss
    assert stages_or_children(model) == [model[0]]
    assert "loss.weight" in dict(model.named_parameters())


def test_a_part_that_is_called_loss_is_the_models_own() -> None:
    model = nn.Sequential()
    model.add_module("loss", nn.Linear(2, 2))
    assert attached_loss(model) is None
    assert len(stages_or_children(model)) == 1
    with pytest.raises(ValueError, match="would be trained as the model's loss, which has one"):
        attach_part(model, "loss", nn.Linear(2, 1))
