"""A hint about targets that may be classes but are floating-point numbers, which loss=auto fits by a regression."""

from contextlib import suppress

import torch

from runner.input.source import Source
from runner.input.stream import Stream
from runner.tensor_values import has_values

MOST_READ = 32  # samples
FEWEST_PER_CLASS = 2  # of these samples, on average
AS_INTEGERS = "let the dataset return them as integers"


def hint_at_classes(source: Source, outputs: torch.Tensor, targets: torch.Tensor) -> str:
    """Return what to do if floating-point targets are classes; empty if they do not look like classes.

    One number per sample looks like a class if it is whole, and some samples have few different ones. Several numbers
    per sample must be 0 or 1. No hint is given about a table, or another dataset that describes itself in the header.

    source: The training data.
    outputs, targets: Of its first samples.
    """
    if not has_values(targets) or not targets.dim() or not _are_whole(targets):
        return ""
    is_single = targets[0].numel() == 1
    if is_single and getattr(source, "header_lines", None):
        return ""
    rows = _read_targets(source)
    numbers = torch.cat(rows).unique() if rows else targets.new_empty(0)
    is_binary = numbers.tolist() == [0, 1]
    is_class = _are_whole(numbers) and 2 <= len(numbers) <= len(rows) // FEWEST_PER_CLASS
    if not (is_class if is_single else is_binary):
        return ""
    if outputs.numel() != targets.numel():
        return AS_INTEGERS
    if is_single:
        return f"{'set loss=bce, or ' * is_binary}{AS_INTEGERS} and give the model an output per class"
    is_one_hot = targets.dim() == 2 and all(float(row.sum()) == 1 for row in rows)
    return "set loss=cross_entropy" if is_one_hot else "set loss=bce"


def _are_whole(numbers: torch.Tensor) -> bool:
    return bool((torch.isfinite(numbers) & (numbers == numbers.floor())).all())


def _read_targets(source: Source) -> list[torch.Tensor]:
    """Return the flattened targets of some samples: of a map-style dataset at equal distances, as it may be sorted."""
    distance = 1 if isinstance(source.dataset, Stream) else -(-len(source) // MOST_READ)
    rows = list[torch.Tensor]()
    with suppress(Exception):  # training reports it; a stream without a length may be shorter
        for number in range(min(MOST_READ, len(source) // distance)):
            rows.append(source.read([number * distance])[1].flatten())
    return rows
