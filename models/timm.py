"""The models of timm, for images of any size and number of channels."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

from .checks import check_images


def create(
    name: str, sample_shape: Sequence[int], num_outputs: int, options: Mapping[str, Any] | None = None
) -> nn.Module:
    """Return the model of timm, without trained weights, (N, C, H, W) -> (N, num_outputs).

    options: further arguments of timm.create_model. Raises ValueError if timm is missing, has no such model or refuses
    an argument.
    Source: https://github.com/huggingface/pytorch-image-models
    """
    check_images("timm", sample_shape, num_outputs)
    try:
        import timm
    except ModuleNotFoundError:
        raise ValueError("model=timm needs timm; pip install 'experiment-runner[timm]'") from None
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        near = get_close_matches(architecture, timm.list_models(), n=3)
        advice = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() returns the names"
        raise ValueError(f"name={name} is not a model of timm; {advice}")
    shape: dict[str, Any] = {"num_classes": num_outputs, "in_chans": sample_shape[0]}
    try:
        if (config := timm.get_pretrained_cfg(name)) and config.fixed_input_size:
            shape["img_size"] = tuple(sample_shape[1:])
        model: nn.Module = timm.create_model(name, **{**shape, **(options or {})})
    except (TypeError, AssertionError, RuntimeError) as error:
        raise ValueError(f"timm refuses {name} with these options: {error}") from None
    return model
