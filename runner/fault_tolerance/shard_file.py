"""One rank's file of a checkpoint: safetensors, written tensor by tensor and hashed on the way."""

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runner.runs.manifest import Written
from runner.training.checkpoint_tensors import OFFSETS, SHARDING
from runner.training.saved_state import Piece

# https://github.com/huggingface/safetensors#format
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}
_SYNC = 2**26  # bytes, after which they go to the disk: a file that grows is one that gets there
_BLOCK = 2**22  # bytes that are written, hashed and if need be copied at a time


def write_shard(path: Path, pieces: Mapping[str, Piece]) -> Written:
    """Write the pieces, to the disk. They are read in their place: no second copy of a shard is in memory.

    torch.distributed.checkpoint's HuggingFaceStorageReader reads such files of several ranks as whole tensors: where a
    piece begins in its tensor is under DCP_SHARDING_INFO. (Its writer makes all of a file in memory first, and that of
    its other format pickles what it knows of the files.) Raises ValueError for what the format has no type for.
    """
    digest, size, synced = hashlib.sha256(), 0, 0
    ordered = _ordered(pieces)
    with path.open("wb", buffering=0) as file:

        def put(block: Any) -> None:
            nonlocal size, synced
            view = memoryview(block)
            digest.update(view)
            size += len(view)
            while len(view):  # a disk that is nearly full takes a part
                view = view[file.write(view) :]
            if size - synced >= _SYNC:
                os.fdatasync(file.fileno())
                synced = size

        put(_header(ordered))
        for piece in ordered.values():
            for block in _blocks(piece.tensor):
                put(block)
        os.fsync(file.fileno())
    return Written(digest.hexdigest(), size)


def size_of(pieces: Mapping[str, Piece]) -> int:
    """Bytes of the file that write_shard makes."""
    return len(_header(_ordered(pieces))) + sum(piece.tensor.nbytes for piece in pieces.values())


def _ordered(pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    """Large elements first, so that each tensor lies where its elements may be read in place."""
    return dict(sorted(pieces.items(), key=lambda item: (-item[1].tensor.element_size(), item[0])))


def _header(pieces: Mapping[str, Piece]) -> bytes:
    listed: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            SHARDING: json.dumps({name: {OFFSETS: list(piece.offsets)} for name, piece in pieces.items()}),
        }
    }
    start = 0
    for name, piece in pieces.items():
        tensor = piece.tensor
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} is a tensor of {tensor.dtype}, which no checkpoint can hold")
        end = start + tensor.nbytes
        listed[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(listed).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _blocks(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor in the order of its elements."""
    if not tensor.numel():
        return
    if not tensor.is_contiguous():  # channels_last, say: one tensor's copy
        tensor = tensor.contiguous()
    rows = tensor.reshape(-1).view(torch.uint8)
    for start in range(0, len(rows), _BLOCK):
        yield rows[start : start + _BLOCK].cpu().numpy()
