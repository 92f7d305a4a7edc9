"""Shards: many samples in each file, as tar (in the layout of WebDataset), JSON lines or Parquet, read by an index."""

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..checks import check_rows, check_sizes
from ..image_files import MODES, decode_image, scale_and_crop
from .index import END, ENDINGS, IMAGES, LINE, START, ShardIndex, build_index, index_path, read_index
from .parquet import ENDING
from .remote import RemoteShards
from .requests import locked

BLOCK_BYTES = 8 * 2**20  # blocks have 2/3 to 3/2 of this size, because a shard is divided into equal parts


class Shards(Dataset[Any]):
    """The samples of the shards in root/SPLIT, or in root if it has no directory train.

    Sample i is (inputs, targets), which are selected by extension and decoded: .npy, .json (numbers and lists) and .cls
    (a class) as numbers, float32 or int64; .jpg, .jpeg and .png as (C, H, W) float32 in [0, 1], scaled and cropped to
    sample_shape as `ImageFolder` does; .txt as the bytes of the text, (T,) int64. In JSON lines, the fields of a record
    replace the extensions. The values of a row of Parquet are members, as `read_rows` returns them.

    Args:
        sample_shape: the shape of the inputs; None: that of all images, or of the first sample.
        num_outputs: the number of classes, or of numbers to predict; None: as in the shards.
        root: the directory, or an address in an object store, such as s3://bucket/prefix.
        input: the extension, field or column of the inputs; None: the only one besides that of the targets.
        target: the extension, field or column of the targets.
        decode: returns a sample from its members, bytes by extension; replaces the decoders and the selection.
        window: the number of blocks whose samples are shuffled together; None: all blocks.
        cache_dir: the directory of the index, if it cannot be written beside the shards, and of copied blocks.
        cache_gb: the size of the copied blocks of an address or of Parquet, over all processes of the machine.
        remote_options: of obstore, for an address; see its documentation. It reads credentials from the environment.

    `block_ends`, (num_blocks,), contains the number of samples up to the end of each block of about 8 MiB.
    Raises ValueError if there are no shards, a shard is truncated or has changed since it was indexed, a member is
    missing or cannot be decoded, or sample_shape or num_outputs do not fit the samples, or are None and not found.
    """

    def __init__(
        self,
        split: Literal["train", "val", "test"],
        sample_shape: Sequence[int] | None = None,
        num_outputs: int | None = None,
        root: str = "datasets/shards",
        input: str | None = None,
        target: str = "cls",
        decode: Callable[[dict[str, bytes]], Any] | None = None,
        window: int | None = 16,
        cache_dir: str = "datasets/shards_cache",
        cache_gb: float = 10.0,
        remote_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_sizes(sample_shape or [1], 1 if num_outputs is None else num_outputs)
        if window is not None and window < 1:
            raise ValueError(f"window={window} must be at least 1, or null for all blocks")
        self.window, self.decode = window, decode
        cache = Path(cache_dir).expanduser()
        self.remote: RemoteShards | None = None
        local = Path(root).expanduser()
        if "://" not in root and any(each for part in ("", split) for each in (local / part).glob(f"*{ENDING}")):
            root = local.resolve().as_uri()  # the rows of Parquet are copied, as blocks of an address are
        if "://" in root:
            try:
                (cache / "blocks").mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"cache_dir={cache_dir} cannot be created ({error.strerror})") from None
            self.remote = RemoteShards(root.rstrip("/"), split, remote_options or {}, cache, cache_gb)
            self.index = _open_remote_index(self.remote, cache)
        else:
            self.directory = _directory(root, split)
            self.index = _open_local_index(self.directory, root, cache)
        self.block_ends = self.index.block_ends(BLOCK_BYTES)
        if self.remote is not None:
            self.remote.row_groups = self.index.row_groups()
            self._check_cache(cache_gb)
        self.target, self.input = target, input or ""
        if decode is None:
            self._choose_members()
        self.sample_shape = self._find_shape() if sample_shape is None else list(sample_shape)
        if decode is None:
            self._check_shape()
        self.num_outputs = self._find_num_outputs() if num_outputs is None else num_outputs
        classes = self.index.found.num_classes.get(self.target, 0)
        if decode is None and _kind(self.target) == "cls" and self.num_outputs < classes:
            raise ValueError(
                f"num_outputs={num_outputs} must be at least {classes}, because the {split} split has a class "
                f"{classes - 1}; set data.num_outputs={classes}"
            )

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> Any:
        check_rows([index], len(self))
        members = self._read(index)
        try:
            if self.decode is not None:
                return self.decode(members)
            fields: Mapping[str, Any] = json.loads(members[LINE]) if LINE in members else members
            return self._tensor(fields, self.input), self._tensor(fields, self.target)
        except Exception as error:  # decoders raise anything for damaged content
            reason = " ".join(f"{type(error).__name__}: {error}".removeprefix("ValueError: ").split())
            raise ValueError(f"{self.index.describe(index)} cannot be decoded ({reason})") from error

    def _read(self, sample: int) -> dict[str, bytes]:
        start, end = self.index.table[sample, :2].tolist()
        name = self.index.shards[self.index.shard_of(sample)]
        if self.remote is None:
            return self.index.sample_in(_read_bytes(self.directory / name, start, end), sample)
        block_start, block_end = self._block_range(int(np.searchsorted(self.block_ends, sample, side="right")))
        is_replaced = False
        while True:
            path = self.remote.block(name, block_start, block_end)
            try:
                return self.index.sample_in(_read_bytes(path, start - block_start, end - block_start), sample)
            except FileNotFoundError:  # another process has removed it since
                continue
            except ValueError:
                if is_replaced:
                    raise
                path.unlink(missing_ok=True)  # perhaps only the copy is damaged
                is_replaced = True

    def copy_ahead(self, samples: Sequence[int]) -> None:
        """Copy the blocks of samples that will be read later, in the background."""
        if self.remote is not None:
            blocks = np.searchsorted(self.block_ends, samples, side="right").tolist()
            shards = [self.index.shards[self.index.shard_of(sample)] for sample in samples]
            self.remote.copy_ahead(
                [(name, *self._block_range(block)) for name, block in zip(shards, blocks, strict=True)]
            )

    def _block_range(self, block: int) -> tuple[int, int]:
        """Return the first byte of a block in its shard, and its end."""
        first, end = (self.block_ends[block - 1] if block else 0), self.block_ends[block]
        return int(self.index.table[first, START]), int(self.index.table[end - 1, END])

    def _check_cache(self, cache_gb: float) -> None:
        """Raise ValueError if the blocks of two windows, of which batches may contain samples, exceed the cache."""
        sizes = sorted(end - start for start, end in map(self._block_range, range(len(self.block_ends))))
        needed = sum(sizes[-2 * (self.window or len(sizes)) :]) / 1e9
        if needed > cache_gb:
            raise ValueError(
                f"cache_gb={cache_gb:g} must be at least {needed:.2g}, the blocks of two windows; or reduce data.window"
            )

    def _tensor(self, fields: Mapping[str, Any], name: str) -> Tensor:
        if name not in fields:
            raise ValueError(f"it has no {name}")
        content, kind = fields[name], _kind(name)
        if not isinstance(content, bytes):  # a field of JSON
            return _as_numbers(content)
        if kind in IMAGES:
            image = decode_image(io.BytesIO(content), MODES[self.sample_shape[0]])
            return scale_and_crop(image, *self.sample_shape[1:]).to(torch.float32).div_(255)
        return _DECODERS[kind](content)

    def _choose_members(self) -> None:
        """Choose the inputs. Raise ValueError unless the first sample has the members, and they can be decoded."""
        first = self._read(0)
        names = list(json.loads(first[LINE])) if LINE in first else list(first)
        self.target, self.input = _with_extension(self.target, names), _with_extension(self.input, names)
        others = [name for name in names if name != self.target]
        for option, name in (("target", self.target), ("input", self.input)):
            if name and name not in names:
                raise ValueError(f"{option}={name}: the first sample has only {', '.join(names)}")
        if not self.input and len(others) != 1:
            raise ValueError(f"input=null: the inputs are one of {', '.join(others) or 'no members'}; name it")
        self.input = self.input or others[0]
        for name in (self.input, self.target) if LINE not in first else ():
            if (kind := _kind(name)) not in (*_DECODERS, *IMAGES):
                known = ", ".join(sorted((*_DECODERS, *IMAGES)))
                raise ValueError(f"decode=null: .{kind} is none of {known}; set data.decode to a function")

    def _check_shape(self) -> None:
        shape = self.sample_shape
        if _kind(self.input) in IMAGES and (len(shape) != 3 or shape[0] not in MODES):
            raise ValueError(f"sample_shape={shape} must be [channels, height, width] with 1 or 3 channels")
        if (found := list(self[0][0].shape)) != shape:
            raise ValueError(f"sample_shape={shape} must be {found}, as in the shards; set data.sample_shape={found}")

    def _find_shape(self) -> list[int]:
        """Return the shape of the inputs. Raise ValueError if they are images of several shapes, or no tensor."""
        if self.decode is None and _kind(self.input) in IMAGES:
            if shape := self.index.found.shapes.get(self.input):
                return shape
            raise ValueError(
                f"sample_shape=null: the images .{self.input} have different sizes; set the one to which they are "
                "scaled, such as data.sample_shape=[3,224,224]"
            )
        sample = self[0]
        if isinstance(sample, (tuple, list)) and len(sample) == 2 and isinstance(sample[0], Tensor) and sample[0].dim():
            return list(sample[0].shape)
        raise ValueError("sample_shape=null: the inputs are not one tensor of at least one dim; set data.sample_shape")

    def _find_num_outputs(self) -> int:
        """Return the number of classes, or of numbers to predict. Raise ValueError if it is unknown."""
        sample = self[0]
        if isinstance(sample, (tuple, list)) and len(sample) == 2:
            with suppress(TypeError, ValueError, RuntimeError):  # the targets may be anything
                target = torch.as_tensor(sample[1])
                if target.is_floating_point() and target.dim() < 2:
                    return target.numel()
                if not target.is_floating_point() and self.target in self.index.found.num_classes:
                    return self.index.found.num_classes[self.target]
        raise ValueError("num_outputs=null: the index does not contain the number of classes; set data.num_outputs")


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _with_extension(name: str, names: Sequence[str]) -> str:
    """Return the name, with an extension if a member has this name only with it."""
    return name if name in names else next((each for each in names if name and each.rpartition(".")[0] == name), name)


def _read_bytes(path: Path, start: int, end: int) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            return os.pread(file, end - start, start)
        finally:
            os.close(file)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None


def _as_numbers(values: Any) -> Tensor:
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{array.dtype} is not a type of numbers; set data.decode to a function")
    return torch.from_numpy(np.array(array, np.float32 if array.dtype.kind == "f" else np.int64))


_DECODERS: dict[str, Callable[[bytes], Tensor]] = {
    "npy": lambda content: _as_numbers(np.load(io.BytesIO(content), allow_pickle=False)),
    "json": lambda content: _as_numbers(json.loads(content)),
    "cls": lambda content: torch.tensor(int(content)),
    "txt": lambda content: torch.from_numpy(np.frombuffer(content, np.uint8).astype(np.int64)),
}


def _directory(root: str, split: str) -> Path:
    directory = Path(root).expanduser()
    if not directory.is_dir():
        raise ValueError(f"root={root} is not a directory (looked in {Path.cwd()})")
    if (directory / split).is_dir():
        return directory / split
    if split != "train":
        raise ValueError(f"root={root}: the {split} split needs shards in {directory / split}, which does not exist")
    return directory


def _open_remote_index(remote: RemoteShards, cache: Path) -> ShardIndex:
    """Return the index of shards at an address: a copy of the one beside them, or else one that is built here."""
    path = index_path(None, f"{remote.root}/{remote.prefix}", cache)

    def build() -> None:
        if not remote.copy_index(path):
            build_index(path, remote.copies())

    return _open_index(path, cache, remote.shards, build)


def _open_local_index(directory: Path, root: str, cache: Path) -> ShardIndex:
    """Return the index of a directory."""
    paths = sorted(path for path in directory.iterdir() if path.name.endswith(ENDINGS))
    if not paths:
        raise ValueError(f"root={root}: {directory} has no shards ({' or '.join(ENDINGS)})")
    path = index_path(directory, str(directory.resolve()), cache)
    shards = {each.name: (each.stat().st_size, "") for each in paths}
    return _open_index(path, cache, shards, lambda: build_index(path, ((each.name, each, "") for each in paths)))


def _open_index(
    path: Path, cache: Path, shards: Mapping[str, tuple[int, str]], build: Callable[[], None]
) -> ShardIndex:
    """Return the index in a file, which is built if it does not exist. Raise ValueError if the shards differ."""
    try:
        if not path.exists():
            with locked(cache / "index.lock"):
                if not path.exists():
                    build()
    except OSError as error:
        raise ValueError(f"cache_dir={cache}: the index cannot be written there ({error.strerror})") from None
    index = read_index(path)
    index.check(shards)
    return index
