"""A decoder-only transformer, which predicts the next token at each position."""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from .blocks import Block, Positions, check_blocks, plan_blocks
from .checks import Plan, check_dropout, check_tokens


class GPT(nn.Module):
    """Embedding, learned positions, `depth` causal pre-norm blocks, a linear head over the vocabulary.

    (N, T) integer tokens below num_outputs -> (N, T, num_outputs) logits. T is at most `sample_shape[0]`, the number of
    learned positions. No output depends on a later token. With `tied`, head and embedding share one Parameter
    (Press, Wolf, "Using the Output Embedding to Improve Language Models", 2016). `dropout` is applied to the embedded
    tokens and to the outputs of attention and perceptron, not to attention weights.
    Raises ValueError if samples are not sequences, `heads` does not divide `dim`, or a size is below 1.
    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019.
    """

    def __init__(
        self,
        sample_shape: Sequence[int],
        num_outputs: int,
        dim: int = 128,
        depth: int = 4,
        heads: int = 4,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        check_tokens("gpt", sample_shape, num_outputs)
        check_blocks(dim, depth, heads, mlp_ratio)
        check_dropout(dropout)
        self.embed = nn.Embedding(num_outputs, dim)
        self.positions = Positions(sample_shape[0], dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(dim, heads, int(dim * mlp_ratio), is_causal=True, dropout=dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_outputs, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self._initialize()

    def _initialize(self) -> None:
        """Draw weights from N(0, 0.02^2), and set biases to 0 and norms to 1.

        The 2 * depth layers that add to the residual stream get smaller weights, because their outputs add up.
        Source: section 2.3 of GPT-2's paper, with the numbers of https://github.com/karpathy/nanoGPT
        """
        added = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():  # a tied parameter once
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=added if name.endswith((".proj.weight", ".down.weight")) else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.is_floating_point():
            kind = str(tokens.dtype).removeprefix("torch.")
            raise TypeError(f"gpt needs tokens, which are integers, but got {kind}; choose a dataset of text")
        features = self.dropout(self.positions(self.embed(tokens)))  # (N, T) -> (N, T, dim)
        for block in self.blocks:
            features = block(features)
        return self.head(self.norm(features))  # (N, T, dim) -> (N, T, num_outputs)

    def stages(self) -> list[nn.Module]:
        return [
            nn.Sequential(self.embed, self.positions, self.dropout),
            *self.blocks,
            nn.Sequential(self.norm, self.head),
        ]

    def tensor_plan(self) -> Plan:
        """Return the plan of the blocks. The head is replicated, because its weight may be the embedding's."""
        return plan_blocks(len(self.blocks))
