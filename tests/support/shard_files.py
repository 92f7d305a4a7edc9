"""Shards for tests."""

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet


def npy(array: np.ndarray) -> bytes:
    """Return the content of a .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def save_tar(path: Path, samples: Sequence[Mapping[str, bytes]], first: int = 0) -> None:
    """Write a shard of samples, whose members are named by extension."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number, members in enumerate(samples, first):
            for extension, content in members.items():
                member = tarfile.TarInfo(f"{number:06}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def save_parquet(path: Path, columns: Mapping[str, Sequence[Any]], rows_per_group: int) -> None:
    """Write a shard of Parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_per_group)


def save_vectors(directory: Path, sizes: Sequence[int]) -> None:
    """Write a shard of each size, with vectors of 8 numbers in 4 classes."""
    generator, first = np.random.default_rng(0), 0
    for shard, size in enumerate(sizes):
        samples = [
            {"npy": npy(generator.normal(size=8)), "cls": b"%d" % (number % 4)} for number in range(first, first + size)
        ]
        save_tar(directory / f"part-{shard:03}.tar", samples, first)
        first += size
