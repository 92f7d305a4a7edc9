"""Samples per second of data=shards and data=image_folder: python benchmarks/shard_reading.py [IMAGES] [ROUNDS]

Each round reads every image once in the order of a run, in one process, from local shards, from blocks copied from a
file:// address (in the first round), and from an image folder. Peak memory is that of the process.
"""

import io
import os
import resource
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from runner.shipped.data.image_folder import ImageFolder
from runner.shipped.data.shards.dataset import Shards

from runner.input.loader import Loader
from runner.input.sampler import Sampler
from runner.input.source import Source

SHAPE, CLASSES, SHARD = [3, 64, 64], 2, 1000


def save(root: Path, count: int) -> int:
    """Write PNG images of noise, about 12 kB each, as files and as shards. Return the bytes of an image."""
    generator, size = np.random.default_rng(0), 0
    for first in range(0, count, SHARD):
        (root / "shards").mkdir(parents=True, exist_ok=True)
        with tarfile.open(root / "shards" / f"{first:08}.tar", "w") as tar:
            for number in range(first, min(first + SHARD, count)):
                Image.fromarray(generator.integers(0, 256, (64, 64, 3), np.uint8)).save(file := io.BytesIO(), "png")
                path = root / "images" / "train" / str(number % CLASSES) / f"{number:08}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.getvalue())
                size = len(file.getvalue())
                for extension, content in (("png", file.getvalue()), ("cls", str(number % CLASSES).encode())):
                    member = tarfile.TarInfo(f"{number:08}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return size


def main(count: int = 1000, rounds: int = 3) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        size, cache = save(root, count), str(root / "cache")
        sources = {
            "shards": Shards("train", SHAPE, CLASSES, str(root / "shards"), cache_dir=cache),
            "shards, file://": Shards("train", SHAPE, CLASSES, (root / "shards").as_uri(), cache_dir=cache),
            "image_folder": ImageFolder("train", SHAPE, CLASSES, str(root / "images")),
        }
        print(f"{count} images of {size:,} bytes, load {os.getloadavg()[0]:.1f}")
        for number in range(rounds):
            for label, dataset in sources.items():
                sampler = Sampler(count, 100, seed=number)
                loader = Loader(Source.of(dataset), sampler, torch.float32, torch.device("cpu"))
                start, cpu = time.perf_counter(), time.process_time()
                for _ in loader.steps(0):
                    pass
                seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
                loader.close()
                print(f"round {number}  {label:16} {count / seconds:9,.0f} samples/s  {count / cpu:9,.0f} per CPU s")
        print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
