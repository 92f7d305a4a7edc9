"""What every data set promises: values, repeatability, both ways to read, what it refuses, its configuration."""

import importlib
import inspect
import pickle
from pathlib import Path

import pytest
import torch
import yaml
from data_sets import CONF, KINDS, MADE, assert_both_ways_agree
from torch.utils.data import DataLoader

from data.digits import Digits


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_samples_and_targets(name, train):
    kind, sample_shape, num_outputs, num_train, num_val = MADE[name]
    data = kind(train=train, sample_shape=sample_shape, num_outputs=num_outputs)
    assert len(data) == (num_train if train else num_val)
    samples, targets = data.__getitems__([0, len(data) - 1, 5])
    assert samples.shape == (3, *sample_shape) and samples.dtype == torch.float32
    if name in ("toy", "random"):
        assert targets.shape == (3, num_outputs) and targets.dtype == torch.float32
    else:
        assert targets.shape == (3,) and targets.dtype == torch.int64
        assert targets.min() >= 0 and targets.max() < num_outputs


@pytest.mark.parametrize("name", MADE)
def test_both_ways_to_read_agree(name):
    kind, sample_shape, num_outputs, *_ = MADE[name]
    for train in (True, False):
        assert_both_ways_agree(kind(train=train, sample_shape=sample_shape, num_outputs=num_outputs))


@pytest.mark.parametrize("name", MADE)
def test_the_same_every_time_whatever_the_global_seed(name):
    kind, sample_shape, num_outputs, *_ = MADE[name]
    batches = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        batches.append(kind(train=True, sample_shape=sample_shape, num_outputs=num_outputs).__getitems__(range(50)))
        assert torch.equal(torch.get_rng_state(), state)  # and the global generator is left alone
    assert torch.equal(batches[0][0], batches[1][0]) and torch.equal(batches[0][1], batches[1][1])


@pytest.mark.parametrize("name", MADE)
def test_values_do_not_depend_on_the_number_of_threads(name):
    kind, sample_shape, num_outputs, *_ = MADE[name]
    batches, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            batches.append(
                kind(train=True, sample_shape=sample_shape, num_outputs=num_outputs).__getitems__(range(999))
            )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(batches[0][0], batches[1][0]) and torch.equal(batches[0][1], batches[1][1])


@pytest.mark.parametrize("name", MADE)
def test_sets_pickle_for_the_workers_of_a_loader(name):
    kind, sample_shape, num_outputs, *_ = MADE[name]
    data = kind(train=False, sample_shape=sample_shape, num_outputs=num_outputs)
    ours, copies = data.__getitems__([3, 1]), pickle.loads(pickle.dumps(data)).__getitems__([3, 1])
    assert torch.equal(ours[0], copies[0]) and torch.equal(ours[1], copies[1])


def test_a_loader_passes_collated_batches_through():
    data = Digits(train=False, sample_shape=(1, 28, 28), num_outputs=10)
    batches = list(DataLoader(data, batch_size=100, collate_fn=lambda batch: batch))
    assert [len(targets) for _, targets in batches] == [100, 100, 100, 60]
    assert torch.equal(torch.cat([samples for samples, _ in batches]), data.__getitems__(range(360))[0])
    collated = next(iter(DataLoader([data[i] for i in range(100)], batch_size=100)))
    assert torch.equal(collated[0], batches[0][0]) and torch.equal(collated[1], batches[0][1])


@pytest.mark.parametrize("name", MADE)
def test_empty_sizes_and_counts_are_refused(name):
    kind, sample_shape, num_outputs, *_ = MADE[name]
    with pytest.raises(ValueError, match=r"^sample_shape=\[\] must be one or more sizes"):
        kind(train=True, sample_shape=(), num_outputs=num_outputs)
    with pytest.raises(ValueError, match=r"^sample_shape=\[1, 0, 28\] must be one or more sizes"):
        kind(train=True, sample_shape=(1, 0, 28), num_outputs=num_outputs)
    with pytest.raises(ValueError, match=r"^num_outputs=0 must be"):
        kind(train=True, sample_shape=sample_shape, num_outputs=0)
    for option in {"num_train", "num_val"} & set(inspect.signature(kind).parameters):
        with pytest.raises(ValueError, match=f"^{option}=0 must be at least 1"):
            kind(train=True, sample_shape=sample_shape, num_outputs=num_outputs, **{option: 0})


@pytest.mark.parametrize("name", KINDS)
def test_configuration_states_every_option_and_its_default(name):
    text = (CONF / f"{name}.yaml").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("# example: ")]
    assert lines[0].startswith("# ") and not lines[0].endswith(".")
    assert all("  # " in line or line.endswith(":") for line in lines[2:])
    options = yaml.safe_load(text)
    module, _, attribute = options.pop("_target_").rpartition(".")
    assert getattr(importlib.import_module(module), attribute) is KINDS[name]
    if name in MADE:
        _, sample_shape, num_outputs, num_train, num_val = MADE[name]
        assert (tuple(options["sample_shape"]), options["num_outputs"]) == (sample_shape, num_outputs)
        assert (options.get("num_train", num_train), options.get("num_val", num_val)) == (num_train, num_val)
    parameters = inspect.signature(KINDS[name]).parameters
    told = next(iter(parameters))
    assert told in ("train", "split") and list(parameters)[1:3] == ["sample_shape", "num_outputs"]
    assert options.keys() == parameters.keys() - {told}
    own = [parameter for parameter in list(parameters.values())[3:] if parameter.default is not parameter.empty]
    assert {p.name: options[p.name] for p in own} == {p.name: p.default for p in own}


def test_models_and_data_are_plain_pytorch():
    root = Path(__file__).parents[2]
    sources = [path for folder in ("models", "data") for path in (root / folder).glob("*.py")]
    assert len(sources) > 10
    for path in sources:
        text = path.read_text()
        for word in ("runner", "hydra", "omegaconf", "torch.distributed"):
            assert f"import {word}" not in text and f"from {word}" not in text, path


def test_made_sets_do_not_import_what_they_do_not_need():
    for name, module in (("toy", "data.toy"), ("random", "data.random"), ("counting", "data.counting")):
        source = Path(importlib.import_module(module).__file__).read_text()
        assert "torchvision" not in source and "sklearn" not in source, name
