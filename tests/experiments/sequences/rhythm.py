"""Token sequences of different lengths, classified by their rhythm, and an LSTM."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence


class Rhythm:
    """Sample i: its tokens, (T,) int64 from 1 to 4, T from 2 to 9; the class is how often their rhythm repeats."""

    def __init__(self, train: bool, num_train: int = 41, num_val: int = 11):
        draw = torch.Generator().manual_seed(int(train))
        self.samples = []
        for _ in range(num_train if train else num_val):
            length, period = (
                int(torch.randint(2, 10, (), generator=draw)),
                int(torch.randint(1, 4, (), generator=draw)),
            )
            beat = torch.randint(1, 5, (period,), generator=draw)
            self.samples.append((beat.repeat(length)[:length], period - 1))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.samples[index]

    def collate(self, samples: list[tuple[Tensor, int]]) -> tuple[dict[str, Tensor], Tensor]:
        """-> ({tokens: (N, T), 0 where a sequence has ended; lengths: (N,)}, (N,))"""
        tokens, classes = zip(*samples, strict=True)
        lengths = torch.tensor([len(each) for each in tokens])
        return {"tokens": pad_sequence(tokens, batch_first=True), "lengths": lengths}, torch.tensor(classes)


class Reader(nn.Module):
    """An embedding, an LSTM, and a linear layer on its last state."""

    def __init__(self, num_outputs: int, width: int = 6):
        super().__init__()
        self.embed = nn.Embedding(5, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, num_outputs)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:  # (N, T), (N,) -> (N, num_outputs)
        packed = pack_padded_sequence(self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (state, _) = self.lstm(packed)  # (2, N, width)
        return self.head(state.movedim(0, 1).flatten(1))
