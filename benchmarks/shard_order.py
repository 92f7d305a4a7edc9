"""The quality of the order of `data.window`: python benchmarks/shard_order.py

It uses 102,400 samples in 128 blocks, sorted by class (10 classes), in batches of 256, with seed 0 and epoch 0.
"""

import numpy as np

from runner.input.rng import derive_seed
from runner.input.sampler import BlockPermutation

SAMPLES, BLOCKS, CLASSES, BATCH = 102_400, 128, 10, 256


def main() -> None:
    ends = np.arange(1, BLOCKS + 1, dtype=np.uint64) * np.uint64(SAMPLES // BLOCKS)
    positions = np.arange(SAMPLES, dtype=np.uint64)
    print("window  distance of neighbors  correlation of neighbors  classes per batch  deviation of a class")
    for window in (1, 4, 16, 64, BLOCKS):
        order = BlockPermutation(ends, window, derive_seed(0, 0))(positions).astype(np.float64)
        distance = np.abs(np.diff(order)).mean() / (SAMPLES / 3)  # of independent samples: 1
        correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
        classes = (order // (SAMPLES // CLASSES)).astype(int).reshape(-1, BATCH)
        counts = np.stack([np.bincount(batch, minlength=CLASSES) for batch in classes])
        # The deviation of the number of samples of a class in a batch, relative to that of independent samples.
        deviation = counts.std() / np.sqrt(BATCH / CLASSES * (1 - 1 / CLASSES))
        print(f"{window:6} {distance:22.3f} {correlation:25.3f} {(counts > 0).sum(1).mean():18.1f} {deviation:21.2f}")


if __name__ == "__main__":
    main()
