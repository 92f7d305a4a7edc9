"""Checks of a model's options before it is built, and the type of its tensor plan."""

from collections.abc import Sequence
from typing import Literal

# How the weights of linear layers are sharded, by name in the order of forward; see models/__init__.py.
Plan = dict[str, Literal["colwise", "rowwise"]]


def check_sizes(sample_shape: Sequence[int], num_outputs: int) -> None:
    """Raise ValueError unless samples have at least one dim and all sizes are at least 1."""
    if not sample_shape or min(sample_shape) < 1:
        raise ValueError(f"sample_shape={list(sample_shape)} must be one or more sizes of at least 1, such as [10]")
    if num_outputs < 1:
        raise ValueError(f"num_outputs={num_outputs} must be at least 1")


def check_images(model: str, sample_shape: Sequence[int], num_outputs: int, least: int = 1) -> None:
    """Call check_sizes. Raise ValueError unless samples are images (C, H, W) of at least `least` x `least` pixels."""
    check_sizes(sample_shape, num_outputs)
    if len(sample_shape) != 3 or min(sample_shape[1:]) < least:
        raise ValueError(
            f"{model} needs image samples (channels, height, width) of at least {least} x {least}, but the samples "
            f"have shape {tuple(sample_shape)}; choose a dataset of images, such as digits, or another model, such "
            "as mlp"
        )


def check_tokens(model: str, sample_shape: Sequence[int], num_outputs: int) -> None:
    """Call check_sizes. Raise ValueError unless samples are sequences (tokens,)."""
    check_sizes(sample_shape, num_outputs)
    if len(sample_shape) != 1:
        raise ValueError(
            f"{model} needs samples that are sequences of tokens, but the samples have shape {tuple(sample_shape)}; "
            "choose a dataset of tokens, such as text, or another model, such as mlp"
        )


def check_dropout(dropout: float) -> None:
    """Raise ValueError unless the probability is in [0, 1)."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must be at least 0 and below 1; try 0.1")
