"""What `keep_samples=true` is worth: epochs over a folder of JPEG files, decoded each time and kept, in turn.

usage: python benchmarks/kept_samples.py [--images 600] [--size 256] [--rounds 5]
One process, one thread, no loader workers, and nothing is trained: what reading alone takes. Each round is an epoch of
images that are decoded, the first epoch of images that are kept, which decodes them too, and one that finds them there.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from data.image_folder import ImageFolder
from runner.training.kept_samples import KeptSamples
from runner.training.loader import Loader
from runner.training.precision import Precision
from runner.training.sampler import Sampler

CPU = torch.device("cpu")
BATCH = 50


def write_images(root: Path, number: int, size: int) -> None:
    """Two classes of smooth coloured noise, size x size, as files that a camera could have made."""
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("one", "other"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for count in range(number // 2 if split == "train" else 1):
                coarse = Image.fromarray(random.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8))
                coarse.resize((size, size), Image.Resampling.BICUBIC).save(folder / f"{count}.jpg", quality=90)


def rate(loader: Loader, epoch: int) -> float:
    """Samples a second."""
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
        images = ImageFolder(True, [3, given.size, given.size], 2, root)
        found: dict[str, list[float]] = {"decoded": [], "kept, first epoch": [], "kept": []}
        for number in range(given.rounds):
            kept = KeptSamples(images)
            plain, keeping = (
                Loader(each, Sampler(len(images), BATCH), Precision("fp32", CPU), CPU) for each in (images, kept)
            )
            found["decoded"].append(rate(plain, number))
            found["kept, first epoch"].append(rate(keeping, number))
            found["kept"].append(rate(keeping, number + 1))
    for name, rates in found.items():
        ratios = [one / other for one, other in zip(rates, found["decoded"], strict=True)]
        print(
            f"{name:18s} {max(rates):9,.0f} images/s at best, {statistics.median(rates):9,.0f} in the median; "
            f"{statistics.median(ratios):6.2f} x decoded in the median of {given.rounds}"
        )
    print(f"{kept.num_bytes / 2**20:,.0f} MiB are kept of {given.images} images")


if __name__ == "__main__":
    main()
