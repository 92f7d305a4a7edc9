"""The arguments with which the objective of a run calls its model, for some samples of the data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from runner.config.schema import Config
from runner.distributed.world import World
from runner.errors import InputError, first_line
from runner.input.batch import MicroBatch, cast_floating
from runner.input.datasets import load_split
from runner.input.pytree import map_tensors, register_types
from runner.objectives.supervised import Supervised, call_model
from runner.optimization.precision import Precision
from runner.training.components import make_objective, make_parallel


class _Called(BaseException):
    """Ends a call once its arguments are known. No `except Exception` of a model catches a BaseException."""


@dataclass(frozen=True)
class Example:
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_samples: int
    ragged: bool  # the sizes of dims other than the first may vary between batches

    def run(self, model: Callable[..., Any]) -> Any:
        """Call the model, or an exported program, and return its outputs."""
        with torch.no_grad():
            return model(*self.args, **self.kwargs)


class Examples:
    """Example calls with the first samples of the split `config.split`. Raises InputError if they cannot be loaded."""

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
        """The names of the classes in order, if the dataset defines them."""
        found = getattr(self._dataset, "classes", None)
        return [str(name) for name in found] if isinstance(found, (list, tuple)) else None

    def of(self, num_samples: int) -> Example:
        """Return the call for this number of samples. Raise InputError if the objective does not call the model."""
        try:
            batch = self._dataset.read(range(num_samples))
        except Exception as error:  # reading runs the user's code, which may raise anything
            raise InputError(f"data: its first samples cannot be collated into a batch: {first_line(error)}") from None
        batch = map_tensors(lambda tensor: cast_floating(tensor, self._precision.parameter_dtype), batch)
        found: list[Example] = []

        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            found.append(Example(args, dict(kwargs), num_samples, ragged=hasattr(self._dataset, "collate")))
            raise _Called

        handle = self._model.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            with torch.no_grad():
                if isinstance(self._objective, Supervised):
                    call_model(self._model, MicroBatch(batch, range(num_samples)).inputs)
                else:
                    self._objective.predict(self._model, batch)
        except _Called:
            return found[0]
        except Exception as error:  # the user's code
            raise InputError(
                f"{self._named}: predict failed for the first samples of the data: {first_line(error)}"
            ) from None
        finally:
            handle.remove()
        raise InputError(
            f"{self._named}: predict(model, batch) does not call the model's forward, so there is no call to export; "
            "change it, or use export.format=safetensors"
        )


def describe_tensors(tree: Any, num_samples: int) -> list[dict[str, Any]]:
    """Return name, dtype and shape of each tensor of a pytree. The dim of the samples is called "batch"."""
    leaves, _ = tree_flatten_with_path(register_types(tree))
    return [
        {
            "name": keystr(path).removeprefix("['").replace("']", "", 1) or "outputs",
            "dtype": str(leaf.dtype).removeprefix("torch."),
            "shape": ["batch" if dim == 0 and size == num_samples else size for dim, size in enumerate(leaf.shape)],
        }
        for path, leaf in leaves
        if isinstance(leaf, Tensor)
    ]
