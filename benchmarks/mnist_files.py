"""Write MNIST-format files from scikit-learn's digits, as data for benchmarks.

usage: python benchmarks/mnist_files.py ROOT      then data=mnist data.root=ROOT reads them
60,000 training and 10,000 test images, each a real digit scaled and shifted; no source digit is in both.
"""

import argparse
import struct
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import interpolate, pad

SIZE, SCALED, TRAINING_DIGITS = 28, 20, 1500


def main(root: str) -> None:
    digits = load_digits()
    stream = torch.Generator().manual_seed(0)
    order = torch.randperm(len(digits.target), generator=stream)
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    images = interpolate(images, size=SCALED, mode="bicubic").clamp(0, 1)
    labels = torch.tensor(digits.target, dtype=torch.uint8)[order]
    folder = Path(root) / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for name, number, chosen in (
        ("train", 60_000, slice(None, TRAINING_DIGITS)),
        ("t10k", 10_000, slice(TRAINING_DIGITS, None)),
    ):
        sources, targets = images[chosen], labels[chosen]
        picks = torch.randint(len(sources), (number,), generator=stream)
        margins = torch.randint(SIZE - SCALED + 1, (number, 2), generator=stream).tolist()
        pixels = np.empty((number, SIZE, SIZE), np.uint8)
        for index, (pick, (left, top)) in enumerate(zip(picks.tolist(), margins, strict=True)):
            around = (left, SIZE - SCALED - left, top, SIZE - SCALED - top)
            pixels[index] = (pad(sources[pick, 0], around) * 255).to(torch.uint8).numpy()
        header = struct.pack(">IIII", 2051, number, SIZE, SIZE)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        header = struct.pack(">II", 2049, number)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(header + targets[picks].numpy().tobytes())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    main(parser.parse_args().root)
