"""One rank's file of a checkpoint: safetensors, written tensor by tensor, and read in boxes of tensors."""

import functools
import hashlib
import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES
from torch import Tensor
from torch.distributed.tensor import DTensor

from runner.checkpoints.layout import FileRecord
from runner.records.run_files import without_links

_NAMES = {dtype: name for name, dtype in _TYPES.items()}  # https://github.com/huggingface/safetensors#format
# Keys of a file's metadata, as torch.distributed.checkpoint's HuggingFaceStorageReader reads them.
_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_PAIRS = "complex128"  # names of tensors that are stored as pairs of float64, because the format has no complex128
_SYNC = 2**26  # bytes, after which data are flushed to the disk, so that other ranks see the file grow
_BLOCK = 2**22  # bytes that are written, hashed and if necessary copied at a time

Slices = tuple[slice, ...]
Shapes = dict[str, tuple[torch.dtype, list[int]]]  # the dtype and the shape of each tensor by its name


@dataclass(frozen=True)
class LocalChunk:
    """A box of a tensor that this rank stores: the whole tensor, or its part of a sharded one."""

    tensor: Tensor  # this rank's memory, not a copy
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "LocalChunk":
        """Return this rank's part of a tensor."""
        if not isinstance(tensor, DTensor):
            return cls(tensor.detach(), (0,) * tensor.dim())
        (chunk,) = tensor.__create_chunk_list__()
        return cls(tensor.to_local().detach(), tuple(chunk.offsets))


@dataclass(frozen=True)
class SavedChunk:
    """A box of a tensor, which one file contains."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[Slices], Tensor]  # slices within the box; returns a view of the file if possible

    def fill(self, target: LocalChunk) -> None:
        """Copy the elements that both chunks contain into the target."""
        starts = [max(pair) for pair in zip(self.offsets, target.offsets, strict=True)]
        sizes = zip(self.offsets, self.shape, target.offsets, target.tensor.shape, strict=True)
        ends = [min(here + size, there + extent) for here, size, there, extent in sizes]
        if any(start >= end for start, end in zip(starts, ends, strict=True)):
            return

        def box(offsets: tuple[int, ...]) -> Slices:
            return tuple(slice(s - o, e - o) for s, e, o in zip(starts, ends, offsets, strict=True))

        target.tensor[box(target.offsets)].copy_(self.read(box(self.offsets)))


@dataclass
class SavedTensor:
    """A tensor of a checkpoint, which is read when it is needed."""

    dtype: torch.dtype
    chunks: list[SavedChunk] = field(default_factory=list)

    @classmethod
    def of(cls, tensor: Tensor) -> "SavedTensor":
        """Return a tensor that another file format contains."""
        return cls(tensor.dtype, [SavedChunk((0,) * tensor.dim(), tuple(tensor.shape), tensor.__getitem__)])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, which the chunks cover without a hole."""
        ends = [[o + n for o, n in zip(chunk.offsets, chunk.shape, strict=True)] for chunk in self.chunks]
        return tuple(max(sizes) for sizes in zip(*ends, strict=True))

    def converted(self, dtype: torch.dtype) -> "SavedTensor":
        """Return the tensor in another dtype, to which each part is converted when it is read."""
        if dtype == self.dtype:
            return self
        parts = [(chunk, functools.partial(_read_as, chunk.read, dtype)) for chunk in self.chunks]
        return SavedTensor(dtype, [replace(chunk, read=read) for chunk, read in parts])

    def read(self) -> Tensor:
        """Return the whole tensor on the CPU; a view of the file if one file contains it."""
        if len(self.chunks) == 1:
            return self.chunks[0].read(tuple(slice(0, size) for size in self.chunks[0].shape))
        whole = torch.empty(self.shape, dtype=self.dtype)
        self.fill(whole)
        return whole

    @torch.no_grad()
    def fill(self, target: Tensor) -> None:
        """Fill a tensor of this shape; if it is sharded, this rank's part of it."""
        local = LocalChunk.of(target)
        for chunk in self.chunks:
            chunk.fill(local)


def write_shard(path: Path, chunks: Mapping[str, LocalChunk]) -> FileRecord:
    """Write the chunks and flush them to the disk, without a second copy of the shard in memory.

    torch.distributed.checkpoint's HuggingFaceStorageReader reads such files of several ranks as whole tensors, because
    the metadata contain each chunk's offsets. torch's own writer of this format builds the whole file in memory first,
    and torch's default format pickles its metadata. Raise ValueError for a dtype that safetensors does not support.
    """
    shapes = _large_first({name: (chunk.tensor.dtype, list(chunk.tensor.shape)) for name, chunk in chunks.items()})
    pairs = {name: (torch.float64, [*shape, 2]) for name, (dtype, shape) in shapes.items() if dtype == torch.complex128}
    offsets = {name: {_OFFSETS: [*chunk.offsets, *([0] if name in pairs else [])]} for name, chunk in chunks.items()}
    metadata = {"DCP_VERSION": "1.0", _PAIRS: json.dumps([*pairs]), _SHARDING: json.dumps(offsets)}
    return _write(path, shapes | pairs, metadata, lambda name: chunks[name].tensor)


def write_tensors(path: Path, tensors: Mapping[str, SavedTensor]) -> None:
    """Write whole tensors to a file of safetensors, and flush it to the disk; only one tensor is in memory at a time.

    Raise ValueError for a dtype that safetensors does not support.
    """
    shapes = _large_first({name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()})
    _write(path, shapes, {}, lambda name: tensors[name].read())


def _large_first(shapes: Shapes) -> Shapes:
    """Return the tensors with large elements first, so that each tensor is aligned in the file."""
    return dict(sorted(shapes.items(), key=lambda item: (-item[1][0].itemsize, item[0])))


def _write(path: Path, shapes: Shapes, metadata: Mapping[str, str], read: Callable[[str], Tensor]) -> FileRecord:
    """Write tensors of these dtypes and shapes, which `read` returns by name, and flush them to the disk."""
    digest, size, synced = hashlib.sha256(), 0, 0
    blocks = itertools.chain.from_iterable(_blocks(read(name)) for name in shapes)
    with open(path, "wb", buffering=0, opener=without_links) as file:
        for block in itertools.chain([_header(shapes, metadata)], blocks):
            view = memoryview(block)
            digest.update(view)
            size += len(view)
            while len(view):  # an unbuffered write may be partial
                view = view[file.write(view) :]
            if size - synced >= _SYNC:
                os.fdatasync(file.fileno())
                synced = size
        os.fsync(file.fileno())
    return FileRecord(sha256=digest.hexdigest(), size=size)


def open_shards(files: Iterable[Path]) -> dict[str, SavedTensor]:
    """Return the tensors of the safetensors files among these, by name. Only the headers are read."""
    tensors: dict[str, SavedTensor] = {}
    for file in sorted(file for file in files if file.suffix == ".safetensors"):
        try:
            opened: Any = safe_open(str(file), framework="pt", device="cpu")
            metadata = opened.metadata() or {}
            offsets = json.loads(metadata.get(_SHARDING, "{}"))  # whole tensors without it
            pairs = json.loads(metadata.get(_PAIRS, "[]"))
            for name in opened.keys():  # noqa: SIM118  # no mapping
                part = opened.get_slice(name)
                dtype: Any = _TYPES[part.get_dtype()]
                shape = tuple(part.get_shape())
                start = tuple(offsets[name][_OFFSETS]) if offsets else (0,) * len(shape)
                read = functools.partial(_read, opened, name)
                if name in pairs:
                    dtype, shape, start = torch.complex128, shape[:-1], start[:-1]
                    read = functools.partial(_read_pairs, opened, name)
                saved = tensors.setdefault(name, SavedTensor(dtype))
                if start not in [chunk.offsets for chunk in saved.chunks]:  # another rank may have written the same box
                    saved.chunks.append(SavedChunk(start, shape, read))
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise ValueError(f"{file} cannot be read as safetensors ({error}); the file is damaged") from None
    return tensors


def _read(file: Any, name: str, slices: Slices) -> Tensor:
    tensor: Tensor = file.get_slice(name)[slices] if slices else file.get_tensor(name)
    return tensor


def _read_as(read: Callable[[Slices], Tensor], dtype: torch.dtype, slices: Slices) -> Tensor:
    return read(slices).to(dtype)


def _read_pairs(file: Any, name: str, slices: Slices) -> Tensor:
    return torch.view_as_complex(_read(file, name, (*slices, slice(0, 2))))


def _header(shapes: Shapes, metadata: Mapping[str, str]) -> bytes:
    """Return the start of a file that contains these tensors in their order."""
    listed: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    start = 0
    for name, (dtype, shape) in shapes.items():
        if dtype not in _NAMES:
            raise ValueError(f"{name} has dtype {dtype}, which a checkpoint cannot store")
        end = start + math.prod(shape) * dtype.itemsize
        listed[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(listed).encode()
    text += b" " * (-(8 + len(text)) % 16)  # the data are aligned for complex128; their length precedes the text
    return struct.pack("<Q", len(text)) + text


def _blocks(tensor: Tensor) -> Iterator[Any]:
    """Yield the bytes of a tensor in the order of its elements."""
    rows = tensor.reshape(-1).view(torch.uint8)  # a copy if the tensor is not contiguous, as in channels_last
    for start in range(0, len(rows), _BLOCK):
        yield rows[start : start + _BLOCK].cpu().numpy()
