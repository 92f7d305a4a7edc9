"""The training and the validation data, fetched once per node where they are not there yet."""

from collections.abc import Mapping
from typing import Any

from runner.config.diagnostics.signature import accepts
from runner.config.instantiate import make_group
from runner.config.schema import Config
from runner.distributed.world import World
from runner.errors import InputError


def load_data(config: Config, choices: Mapping[str, str], world: World) -> tuple[Any, Any]:
    """The training and the validation data. Where files are missing, one process per node fetches them first."""
    describing = {key: config.data[key] for key in ("sample_shape", "num_outputs")}
    node = {key: value for key, value in config.data.items() if key not in describing}

    def load(**options: Any) -> tuple[Any, Any]:
        described = {key: value for key, value in describing.items() if accepts(node["_target_"], key)}
        given = {**node, **described, **options}
        train, val = (make_group(choices, "data", given, train=train) for train in (True, False))
        return train, val

    if not node.get("download"):
        return load()
    loaded: list[tuple[Any, Any]] = []
    missing: list[str] = []
    try:
        loaded.append(load(download=False))
    except InputError as error:
        missing = error.messages
    if not world.agreement.first_error("missing data", missing):
        return loaded[0]
    refused: list[str] = []

    def fetch() -> None:
        try:
            loaded[:] = [load(download=True)]
        except InputError as error:
            refused.extend(error.messages)

    world.agreement.in_turn("download", fetch)
    if refused := world.agreement.first_error("download", refused):
        raise InputError(*refused)
    return loaded[0]
