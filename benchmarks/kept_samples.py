"""The gain from `keep_samples=true`: epochs over JPEG files, decoded each time or kept in memory; interleaved.

usage: python benchmarks/kept_samples.py [--images 600] [--size 256] [--rounds 5]
One process, one thread, no loader workers, and no training: only reading is timed. A round is an epoch without the
cache, the first epoch with it, which decodes the images too, and a second one, which reads from memory.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from runner.shipped.data.image_folder import ImageFolder

from runner.input.loader import Loader
from runner.input.sampler import Sampler
from runner.input.source import Source

CPU = torch.device("cpu")
BATCH = 50


def write_images(root: Path, number: int, size: int) -> None:
    """Write two classes of smooth color noise of size x size pixels as JPEG files, similar to photographs."""
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("one", "other"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for count in range(number // 2 if split == "train" else 1):
                coarse = Image.fromarray(random.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8))
                coarse.resize((size, size), Image.Resampling.BICUBIC).save(folder / f"{count}.jpg", quality=90)


def rate(loader: Loader, epoch: int) -> float:
    """Return samples per second."""
    start = time.perf_counter()
    number = sum(len(batch.indices) for step in loader.steps(epoch) for batch in step.micro_batches)
    return number / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--size", type=int, default=256, help="height and width of the files; samples have the same")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    for option, least in (("images", 2), ("size", 16), ("rounds", 1)):
        if getattr(given, option) < least:
            parser.error(f"--{option}={getattr(given, option)} must be at least {least}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        write_images(Path(root), given.images, given.size)
        images = ImageFolder("train", [3, given.size, given.size], 2, root)
        found: dict[str, list[float]] = {"decoded": [], "kept, first epoch": [], "kept": []}
        for number in range(given.rounds):
            kept = Source.of(images)
            kept.cache_samples()
            plain, keeping = (Loader(each, Sampler(len(images), BATCH), torch.float32, CPU) for each in (images, kept))
            found["decoded"].append(rate(plain, number))
            found["kept, first epoch"].append(rate(keeping, number))
            found["kept"].append(rate(keeping, number + 1))
    for name, rates in found.items():
        ratios = [one / other for one, other in zip(rates, found["decoded"], strict=True)]
        print(
            f"{name:18s} {max(rates):9,.0f} images/s at best, {statistics.median(rates):9,.0f} in the median; "
            f"{statistics.median(ratios):6.2f} x decoded in the median of {given.rounds}"
        )
    assert kept.cache is not None
    print(f"{kept.cache.num_bytes / 2**20:,.0f} MiB are kept of {given.images} images")


if __name__ == "__main__":
    main()
