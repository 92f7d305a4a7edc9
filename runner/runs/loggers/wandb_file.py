"""What is in wandb's files of a run. They are LevelDB's log format with a header of wandb's own.

https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

FILE_HEADER, BLOCK = 7, 32768  # bytes
CHUNK = struct.Struct("<IHB")  # checksum, length, kind
FULL, LAST = 1, 4  # kinds of chunk that end a record


def last_steps(directory: Path, run_id: str) -> dict[str, int]:
    """The last step of each metric, over all files that the run has in its directory."""
    last: dict[str, int] = {}
    for path in directory.glob(f"wandb/*-{run_id}/run-{run_id}.wandb"):
        if not path.parent.is_symlink():  # latest-run
            for step, names in history(path):
                last |= {name: max(step, last.get(name, step)) for name in names}
    return last


def history(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Each step that was logged, and its numbers."""
    from wandb.proto import wandb_internal_pb2

    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]  # made when it is imported
        record.ParseFromString(data)
        if record.WhichOneof("record_type") != "history":
            continue
        values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        step = int(values["_step"])
        yield step, {name: json.loads(text) for name, text in values.items() if not name.startswith("_")}


def _records(data: bytes) -> Iterator[bytes]:
    """Whole records; the last one may have been cut short by a kill."""
    position, record = FILE_HEADER, b""
    while position + CHUNK.size <= len(data):
        if (left := BLOCK - position % BLOCK) < CHUNK.size:
            position += left  # the end of a block that has no room for a chunk
            continue
        _, length, kind = CHUNK.unpack_from(data, position)
        position += CHUNK.size
        if not kind or position + length > len(data):
            return
        record += data[position : position + length]
        position += length
        if kind in (FULL, LAST):
            yield record
            record = b""
