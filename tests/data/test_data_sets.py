"""The contract of every dataset: values, repeatability, both ways to read, refused input, and configuration."""

import importlib
import inspect
import pickle
import re

import pytest
import torch
import yaml
from data_sets import CONF, MADE, assert_both_ways_agree


def make(name, **options):
    kind, sample_shape, num_outputs, *_ = MADE[name]
    return kind(**{"train": True, "sample_shape": sample_shape, "num_outputs": num_outputs, **options})


def assert_same_batch(one, other):
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_samples_and_targets(name, train):
    _, sample_shape, num_outputs, num_train, num_val = MADE[name]
    data = make(name, train=train)
    assert len(data) == (num_train if train else num_val)
    samples, targets = data.__getitems__([0, len(data) - 1, 5])
    assert samples.shape == (3, *sample_shape) and samples.dtype == torch.float32
    if name in ("toy", "random"):
        assert targets.shape == (3, num_outputs) and targets.dtype == torch.float32
    else:
        assert targets.shape == (3,) and targets.dtype == torch.int64
        assert targets.min() >= 0 and targets.max() < num_outputs
    assert_both_ways_agree(data)
    assert_same_batch(data.__getitems__([3, 1]), pickle.loads(pickle.dumps(data)).__getitems__([3, 1]))


@pytest.mark.parametrize("name", MADE)
def test_values_do_not_depend_on_the_global_seed_or_the_number_of_threads(name):
    batches, before = [], torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            torch.manual_seed(number)
            state = torch.get_rng_state()
            batches.append(make(name).__getitems__(range(999)))
            assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_num_threads(before)
    assert_same_batch(*batches)


@pytest.mark.parametrize("name", MADE)
def test_empty_sizes_and_counts_are_refused(name):
    refused = [("sample_shape", (), "must be one or more"), ("num_outputs", 0, "must be")]
    refused.append(("sample_shape", (1, 0, 28), "must be one or more sizes"))
    options = {"num_train", "num_val"} & set(inspect.signature(MADE[name][0]).parameters)
    for option, value, message in [*refused, *((option, 0, "must be at least 1") for option in options)]:
        typed = str([*value]) if isinstance(value, tuple) else str(value)
        with pytest.raises(ValueError, match=f"^{re.escape(f'{option}={typed}')} {message}"):
            make(name, **{option: value})


@pytest.mark.parametrize("path", [*CONF.glob("data/*.yaml"), *CONF.glob("model/*.yaml")], ids=lambda path: path.stem)
def test_configuration_of_datasets_and_models_states_every_option_and_its_default(path):
    options = yaml.safe_load(path.read_text())
    options.pop("defaults", None)
    module, _, attribute = options.pop("_target_").rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(f"runner.shipped.{module}"), attribute)).parameters
    assert options.keys() == parameters.keys() - {"train", "split", "model"}
    for parameter in parameters.values():
        if parameter.default is not parameter.empty and not str(options.get(parameter.name)).startswith("${remote."):
            default = parameter.default
            assert options[parameter.name] == (list(default) if isinstance(default, tuple) else default)
    if path.parent.name == "data" and path.stem in MADE:
        _, sample_shape, num_outputs, *_ = MADE[path.stem]
        assert (tuple(options["sample_shape"]), options["num_outputs"]) == (sample_shape, num_outputs)
