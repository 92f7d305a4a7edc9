"""The rules that every model checks before it is built."""

from collections.abc import Sequence


def check_sizes(sample_shape: Sequence[int], num_outputs: int) -> None:
    """Raise ValueError unless samples have at least one axis, no axis is empty and there is an output."""
    if not sample_shape or min(sample_shape) < 1:
        raise ValueError(f"sample_shape={list(sample_shape)} must be one or more sizes of at least 1, such as [10]")
    if num_outputs < 1:
        raise ValueError(f"num_outputs={num_outputs} must be at least 1")
