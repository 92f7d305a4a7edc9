"""How the model of a run is called: with some samples of its data, as its objective calls it."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from runner.config.diagnostics.own_line import first_line
from runner.config.schema import Config
from runner.distributed.world import World
from runner.errors import InputError
from runner.training.batch import MicroBatch
from runner.training.build import make_parallel
from runner.training.build_objective import make_objective
from runner.training.datasets import load_split
from runner.training.objective import Objective
from runner.training.precision import Precision
from runner.training.pytree import known, map_tensors
from runner.training.reader import Reader, Share
from runner.training.supervised import Supervised, call


class _Called(BaseException):
    """Ends a call once its arguments are known; no model's own `except Exception` takes it."""


@dataclass(frozen=True)
class Example:
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_samples: int
    ragged: bool  # other batches may have other sizes in other dims than the first

    def run(self, model: Callable[..., Any]) -> Any:
        """What the model, or what was made of it, returns."""
        with torch.no_grad():
            return model(*self.args, **self.kwargs)


class Examples:
    """Of the evaluated data, from its first sample on. Raises InputError where the data is not to be had."""

    def __init__(self, config: Config, choices: Mapping[str, str], model: nn.Module, world: World):
        self._model, self._precision = model, Precision(config.precision, world.device)
        self._dataset = load_split(config, choices, world, config.split)
        self._objective = make_objective(config, choices, make_parallel(config, choices))
        self._named = f"objective={choices.get('objective')}"
        if isinstance(self._objective, nn.Module):
            self._objective.to(dtype=self._precision.parameter_dtype)

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def classes(self) -> list[str] | None:
        """Their names in order, where the data set has numbered them itself."""
        found = getattr(self._dataset, "classes", None)
        return [str(name) for name in found] if isinstance(found, (list, tuple)) else None

    def of(self, num_samples: int) -> Example:
        """The call for that many samples. Raises InputError where the objective makes none that could be one."""
        try:
            batch = Reader(self._dataset).__getitems__(Share(0, list(range(num_samples))))
        except Exception as error:  # reading runs the user's code, which can fail in any way
            raise InputError(f"data: its first samples cannot be made a batch with: {first_line(error)}") from None
        batch = map_tensors(self._precision.cast, batch)
        args, kwargs = _arguments(self._model, self._objective, batch, num_samples, self._named)
        return Example(args, kwargs, num_samples, ragged=hasattr(self._dataset, "collate"))


def _arguments(model: nn.Module, objective: Objective, batch: Any, num_samples: int, named: str) -> Any:
    found: list[Any] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.append((args, dict(kwargs)))
        raise _Called

    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad():
            if isinstance(objective, Supervised):
                call(model, MicroBatch(batch, range(num_samples)).inputs)
            else:
                objective.predict(model, batch)
    except _Called:
        return found[0]
    except Exception as error:  # the user's code
        raise InputError(f"{named}: predict fails for the data's first samples with: {first_line(error)}") from None
    finally:
        handle.remove()
    raise InputError(
        f"{named}: its predict(model, batch) does not call the model's forward, so that there is no call to export; "
        "give it such a predict, or type export.format=safetensors"
    )


def describe_call(model: nn.Module, example: Example) -> list[dict[str, Any]]:
    """Each tensor that forward gets: its name, dtype and shape, of which a dim of the number of samples is batch."""
    bound = inspect.signature(model.forward).bind(*example.args, **example.kwargs)
    return describe_tensors(bound.arguments, example.num_samples)


def describe_tensors(tree: Any, num_samples: int) -> list[dict[str, Any]]:
    """As describe_call, of any pytree."""
    leaves, _ = tree_flatten_with_path(known(tree))
    return [
        {
            "name": keystr(path).removeprefix("['").replace("']", "", 1) or "outputs",
            "dtype": str(leaf.dtype).removeprefix("torch."),
            "shape": ["batch" if dim == 0 and size == num_samples else size for dim, size in enumerate(leaf.shape)],
        }
        for path, leaf in leaves
        if isinstance(leaf, Tensor)
    ]
