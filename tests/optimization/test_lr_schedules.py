"""The learning rate as a function of the step."""

import pytest

from runner.optimization.lr_schedules import Constant, Cosine, Step


def test_warmup_rises_linearly_and_ends_at_one() -> None:
    for schedule in (Constant(warmup_steps=4), Step(warmup_steps=4), Cosine(warmup_steps=4)):
        assert [schedule(step, 100, 10) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert {Constant()(step, 100, 10) for step in range(100)} == {1.0}


def test_cosine_falls_from_1_to_final_factor() -> None:
    schedule = Cosine(final_factor=0.1)
    factors = [schedule(step, 100, 10) for step in range(101)]
    assert factors[0] == 1.0
    assert factors[50] == pytest.approx(0.55)
    assert factors[100] == pytest.approx(0.1)
    assert factors == sorted(factors, reverse=True)
    assert schedule(1000, 100, 10) == pytest.approx(0.1)  # a run that was made longer
    assert Cosine()(0, 1, 1) == 1.0 and Cosine()(99, 100, 10) > 0  # the last step trains


def test_step_schedule_drops_every_few_epochs() -> None:
    schedule = Step(every_epochs=2, gamma=0.5)
    assert [schedule(step, 100, 10) for step in (0, 19, 20, 39, 40)] == [1, 1, 0.5, 0.5, 0.25]


def test_invalid_schedule_options_are_refused() -> None:
    for kind, options, message in (
        (Constant, {"warmup_steps": -1}, "warmup_steps=-1"),
        (Cosine, {"final_factor": 1.5}, "final_factor=1.5"),
        (Step, {"every_epochs": 0}, "every_epochs=0"),
        (Step, {"gamma": 0.0}, "gamma=0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(**options)
