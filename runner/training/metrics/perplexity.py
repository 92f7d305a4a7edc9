"""How many classes a language model is unsure between, per token."""

import torch

from runner.training.metrics.class_dim import ClassDim, ClassDimOption, IgnoreIndex, as_ignored, counted


class Perplexity:
    """exp of the mean cross entropy of the positions that count, from logits or log-probabilities.

    Source: Jelinek, Mercer, Bahl, Baker, "Perplexity: a measure of the difficulty of speech recognition tasks", 1977.
    """

    higher_is_better = False

    def __init__(self, ignore_index: IgnoreIndex = None, class_dim: ClassDimOption = None):
        self._ignored, self._classes = as_ignored(ignore_index), ClassDim(class_dim)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """As Accuracy -> (2,): sum of -log p(target), and how many positions count."""
        logits, classes = self._classes.last("perplexity", outputs, targets)
        counts = counted(classes, self._ignored)
        logits, classes = logits[counts], classes[counts]
        scale = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        # log_softmax leaves log-probabilities as they are: their exponentials sum to 1
        log_probabilities = scale.log_softmax(-1).gather(-1, classes[:, None].long())  # (positions, 1)
        return torch.stack([-log_probabilities.double().sum(), counts.sum().double()])

    def compute(self, sums: torch.Tensor) -> torch.Tensor:
        return (sums[0] / sums[1]).exp()
