"""The sizes of the data to which models refer, if the configuration leaves them to the dataset."""

from collections.abc import Mapping
from typing import Any

from runner.config.diagnostics.signature import accepts, check_options, provided
from runner.config.instantiate import make_group
from runner.errors import InputError

SIZES: dict[str, Any] = {"sample_shape": [1] * 8, "num_outputs": 1}  # with values that stand in for unknown ones
TRAIN = {"split": "train", "train": True}  # values of the argument that selects the split


def unknown_sizes(node: Any) -> dict[str, Any]:
    """Return the sizes that are null in the node of the data, with values by which references to them are resolved."""
    return {name: value for name, value in SIZES.items() if isinstance(node, Mapping) and node.get(name, 0) is None}


def find_sizes(node: dict[str, Any], choices: Mapping[str, str]) -> dict[str, Any]:
    """Return the sizes that are null in the node of the data, from attributes of the training split.

    Raise InputError if an option is wrong, its constructor does not accept null, or the split cannot be opened.
    """
    missing = [*unknown_sizes(node)]
    if messages := check_options("data", node, option := provided("data", node), SIZES):
        raise InputError(*messages)
    options = {name: value for name, value in node.items() if name not in SIZES or accepts(node["_target_"], name)}
    try:
        dataset = make_group(choices, "data", options, **{name: TRAIN[name] for name in option})
    except InputError as error:
        fix = f"; {' and '.join(f'data.{name}' for name in missing)} are read there, unless they are set"
        raise InputError(*(text + fix * text.startswith("data.root=") for text in error.messages)) from None
    return {name: getattr(dataset, name) for name in missing if hasattr(dataset, name)}
