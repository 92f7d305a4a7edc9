"""An index of shards: where each sample is in the files of a directory, and a checksum of it."""

import hashlib
import io
import json
import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..image_files import image_shape
from . import parquet
from .requests import write

FORMAT = 3  # of the file
NAME = "index.shards"
ENDINGS = (".tar", ".jsonl", parquet.ENDING)
LINE = "jsonl"  # the only member of a sample in JSON lines
IMAGES = ("jpg", "jpeg", "png")
# Columns: the bytes of the sample in its shard, and their CRC-32; then those of the members. In a Parquet shard, bytes
# are counted in its rows, one after the other, as `parquet.read_rows` returns them.
START, END, CRC = range(3)

Members = dict[str, tuple[int, int]]  # first byte and number of bytes of each member, by extension


@dataclass
class Sizes:
    """The sizes that all samples determine, by the extension of the member, or the field of JSON lines."""

    num_classes: dict[str, int] = field(default_factory=dict)  # 1 + the largest class (.cls) or integer (JSON)
    shapes: dict[str, list[int] | None] = field(default_factory=dict)  # (C, H, W) of images; None if they differ

    def add(self, extension: str, content: bytes) -> None:
        """Include a member. Raise ValueError if it should be a class, and is none."""
        kind = extension.rpartition(".")[2]
        if kind == "cls":
            self._add_class(extension, int(content))
        elif kind == "txt":
            self._add_class(extension, 255)
        elif kind == "json" and content.isdigit():
            self._add_class(extension, int(content))
        with suppress(Exception):  # reading the sample reports content that is damaged
            if kind in IMAGES:
                shape = image_shape(io.BytesIO(content))
                self.shapes[extension] = shape if self.shapes.get(extension, shape) == shape else None
            elif kind == LINE:
                for name, value in json.loads(content).items():
                    if type(value) is int:
                        self._add_class(name, value)

    def _add_class(self, name: str, number: int) -> None:
        self.num_classes[name] = max(self.num_classes.get(name, 1), 1 + number)


@dataclass(frozen=True)
class ShardIndex:
    """The samples of all shards, in the order of the shards' names.

    The file is one line of JSON, and a table of integers that all processes of a machine map into the same memory.
    """

    path: Path
    shards: list[str]  # names
    sizes: list[int]  # bytes
    e_tags: list[str]  # of shards in an object store; empty strings for local files
    bounds: np.ndarray  # (num_shards + 1,), the number of samples before each shard, and that of all samples
    groups: list[list[tuple[int, int, int]]]  # of each shard, as `parquet.row_groups`; empty for other formats
    extensions: list[str]  # of the members
    found: Sizes
    table: np.ndarray  # (num_samples, 3 + 2 * len(extensions)) int64: see START; a missing member has the size -1

    def __reduce__(self) -> tuple[Any, ...]:
        return read_index, (self.path,)

    def __len__(self) -> int:
        return len(self.table)

    def shard_of(self, sample: int) -> int:
        """Return the number of the shard that contains a sample."""
        return int(np.searchsorted(self.bounds, sample, side="right")) - 1

    def block_ends(self, block_bytes: int) -> np.ndarray:
        """Return the number of samples up to the end of each block.

        A block is a row group, a shard, or a part of a shard of about `block_bytes`.
        """
        found = list[int]()
        for size, groups, (first, end) in zip(self.sizes, self.groups, pairwise(self.bounds.tolist()), strict=True):
            ends = [rows for rows, _, _ in groups]
            if not groups:
                parts = max(1, round(size / block_bytes))
                starts = [size * part // parts for part in range(1, parts)]
                ends = [*np.searchsorted(self.table[first:end, START], starts).tolist(), end - first]
            found += [first + each for each in ends]
        return np.unique(found)

    def row_groups(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Return what a request for a row group contains, by the shard and the first byte in its rows."""
        found = {}
        bounds = self.bounds[:-1].tolist()
        for shard, size, groups, bound in zip(self.shards, self.sizes, self.groups, bounds, strict=True):
            first = bound
            for number, (rows, start, stop) in enumerate(groups):
                request = {"group": number, "parts": [[start, stop], [groups[-1][2], size]], "size": size}
                found[shard, int(self.table[first, START])] = request
                first = bound + rows
        return found

    def sample_in(self, content: bytes, sample: int) -> dict[str, bytes]:
        """Return the members of a sample by extension. Raise ValueError if its bytes have changed."""
        start, end, crc, *members = self.table[sample].tolist()
        if len(content) != end - start or zlib.crc32(content) != crc:
            problem = "is truncated" if len(content) < end - start else "has changed since it was indexed"
            raise ValueError(f"{self.describe(sample)} {problem}; {self.advice()}")
        pairs = zip(self.extensions, members[::2], members[1::2], strict=True)
        return {name: content[at - start : at - start + size] for name, at, size in pairs if size >= 0}

    def describe(self, sample: int) -> str:
        """Return the shard of a sample and its number in the shard, from 0, for a message."""
        shard = self.shard_of(sample)
        return f"{self.shards[shard]}, sample {sample - int(self.bounds[shard])}"

    def check(self, shards: Mapping[str, tuple[int, str]]) -> None:
        """Raise ValueError unless the existing shards, with their sizes and e_tags, are those that were indexed."""
        if different := sorted(shards.keys() ^ set(self.shards)):
            state = "is missing" if different[0] in self.shards else "was added after the shards were indexed"
            raise ValueError(f"{different[0]} {state}; {self.advice()}")
        for number, (name, (first, end)) in enumerate(zip(self.shards, pairwise(self.bounds.tolist()), strict=True)):
            size, e_tag = shards[name]
            if size < self.sizes[number]:
                complete = int(np.searchsorted(self.table[first:end, END], size, side="right"))
                if groups := self.groups[number]:
                    complete = max([rows for rows, _, stop in groups if stop <= size], default=0)
                cut = min(first + complete, end - 1)
                raise ValueError(
                    f"{self.describe(cut)} is truncated: the shard had {self.sizes[number]:,} bytes when it was "
                    f"indexed, and has {size:,}; {self.advice()}"
                )
            if size != self.sizes[number] or (self.e_tags[number] and e_tag != self.e_tags[number]):
                raise ValueError(f"{name} has changed since it was indexed; {self.advice()}")

    def advice(self) -> str:
        return f"restore the shards, or remove {self.path} to index them again"


def read_index(path: Path) -> ShardIndex:
    """Return the index in a file. Raise ValueError if it is damaged."""
    try:
        with open(path, "rb") as file:
            header = json.loads(line := file.readline())
        if header.pop("format") != FORMAT:
            raise ValueError("another version wrote it")
        bounds, found = np.array([0, *header.pop("ends")]), Sizes(**header.pop("found"))
        shape = int(bounds[-1]), 3 + 2 * len(header["extensions"])
        table = np.memmap(path, np.int64, "r", len(line), shape)
        return ShardIndex(path, table=table, bounds=bounds, found=found, **header)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it to index the shards again") from None


def build_index(path: Path, shards: Iterator[tuple[str, Path, str]]) -> None:
    """Index shards, each with its name, a local copy of it, and its e_tag, and write the file.

    The file is complete or absent at any time. Raise ValueError if a shard cannot be read, or OSError.
    """
    names, sizes, e_tags, ends, rows = list[str](), list[int](), list[str](), list[int](), list[Any]()
    extensions, sizes_found, groups = list[str](), Sizes(), list[Any]()
    for name, copy, e_tag in shards:
        try:
            groups.append(parquet.row_groups(copy) if name.endswith(parquet.ENDING) else [])
            found = list(_samples_of(copy, name, len(groups[-1]), sizes_found))
        except (tarfile.TarError, EOFError) as error:
            raise ValueError(f"{name} cannot be read ({error}); replace or remove it") from None
        if not found:
            raise ValueError(f"{name} has no samples; remove it")
        for start, end, crc, members in found:
            extensions += [extension for extension in members if extension not in extensions]
            rows.append((start, end, crc, [members.get(extension, (0, -1)) for extension in extensions]))
        names.append(name)
        sizes.append(copy.stat().st_size)
        e_tags.append(e_tag)
        ends.append(len(rows))
    table = np.full((len(rows), 3 + 2 * len(extensions)), -1, np.int64)
    for number, (start, end, crc, members) in enumerate(rows):
        flat = [value for pair in members for value in pair]
        table[number, : 3 + len(flat)] = [start, end, crc, *flat]
    header = {"format": FORMAT, "shards": names, "sizes": sizes, "e_tags": e_tags, "ends": ends, "groups": groups}
    line = json.dumps({**header, "extensions": extensions, "found": asdict(sizes_found)})
    write(path, line.encode() + b"\n" + table.tobytes())


def index_path(directory: Path | None, root: str, cache: Path) -> Path:
    """Return the file of the index: beside local shards if it is there or can be written, or else in the cache."""
    if directory is not None and ((directory / NAME).exists() or os.access(directory, os.W_OK)):
        return directory / NAME
    return cache / f"{hashlib.sha256(root.encode()).hexdigest()[:32]}.shards"


def _samples_of(path: Path, name: str, num_groups: int, found: Sizes) -> Iterator[tuple[int, int, int, Members]]:
    """Yield the first byte, the end and the CRC-32 of each sample of a shard, and its members by extension.

    Include the members in `found`.
    """
    with open(path, "rb") as file:
        if name.endswith(parquet.ENDING):
            parts = _rows(path, num_groups)
        else:
            parts = ((each, None) for each in (_lines if name.endswith(".jsonl") else _tar_samples)(file, name))
        for members, row in parts:
            start = min(at for at, _ in members.values())
            end = max(at + size for at, size in members.values())
            content = os.pread(file.fileno(), end - start, start) if row is None else row
            if len(content) < end - start:
                raise EOFError("unexpected end of data")
            for extension, (at, size) in members.items():
                try:
                    found.add(extension, content[at - start : at - start + size])
                except ValueError as error:
                    raise ValueError(f"{name}: a file .{extension} is not a class ({error})") from None
            yield start, end, zlib.crc32(content), members


def _rows(path: Path, num_groups: int) -> Iterator[tuple[Members, bytes | None]]:
    """Yield the members of each row of Parquet, and their bytes."""
    at = 0
    for group in range(num_groups):
        for row in parquet.read_rows(path, group):
            members, start = {}, at
            for name, value in row.items():
                members[name] = (at, len(value))
                at += len(value)
            if at == start:
                raise EOFError("a row has no values")
            yield members, b"".join(row.values())


def _lines(file: Any, name: str) -> Iterator[Members]:
    at = 0
    for line in file:
        if line.strip():
            yield {LINE: (at, len(line))}
        at += len(line)


def _tar_samples(file: Any, name: str) -> Iterator[Members]:
    """Yield the members of each sample. As in WebDataset, successive files with the same key are one sample."""
    members: Members = {}
    last = None
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            directory, base = os.path.split(member.name)
            key, _, extension = base.partition(".")
            extension = extension.lower()
            if not member.isfile() or not key:
                continue
            if (directory, key) != last and members:
                yield members
                members = {}
            last = (directory, key)
            if extension in members:
                raise ValueError(f"{name} has two files {member.name}; a sample needs another key for each")
            members[extension] = (member.offset_data, member.size)
    if members:
        yield members
