"""Shards in an object store, whose blocks are copied into a bounded directory before or when they are first read."""

import hashlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .index import ENDINGS, NAME
from .requests import NOT_WRITTEN

REQUESTS = Path(__file__).with_name("requests.py")
NUM_LOCKS, NUM_THREADS = 64, 4


class RemoteShards:
    """The shards of a split at an address. Each block is requested once per machine, unless it was removed since.

    Raises ValueError if the address cannot be read or has no shards of the split; all methods if a request fails.
    """

    def __init__(self, root: str, split: str, options: Mapping[str, Any], cache: Path, cache_gb: float):
        self.root, self._options, self._cache, self._cache_gb = root, dict(options), cache, cache_gb
        self._ahead: subprocess.Popen[bytes] | None = None
        self.row_groups: dict[tuple[str, int], dict[str, Any]] = {}  # of Parquet shards, see `ShardIndex.row_groups`
        found = json.loads(self._request({}))
        prefix = f"{split}/" if any(path.startswith(f"{split}/") for path, _, _ in found) else ""
        if split != "train" and not prefix:
            raise ValueError(f"root={root}: the {split} split needs shards in {root}/{split}, which does not exist")
        paths = {path[len(prefix) :]: (size, e_tag) for path, size, e_tag in found if path.startswith(prefix)}
        self.prefix, self._index_size = prefix, paths.get(NAME, (0, ""))[0]
        self.shards = {name: paths[name] for name in sorted(paths) if "/" not in name and name.endswith(ENDINGS)}
        if not self.shards:
            raise ValueError(f"root={root}: {prefix or 'the address'} has no shards ({' or '.join(ENDINGS)})")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": None}

    def copies(self) -> Iterator[tuple[str, Path, str]]:
        """Yield the name, a temporary copy and the e_tag of each shard."""
        path = self._cache / f"{os.getpid()}.shard"
        for name, (size, e_tag) in self.shards.items():
            try:
                self._request({"path": self.prefix + name, "range": [0, size], "file": str(path)})
                yield name, path, e_tag
            finally:
                path.unlink(missing_ok=True)

    def copy_index(self, path: Path) -> bool:
        """Copy the index that is stored beside the shards. Return False if it does not exist."""
        if self._index_size:
            self._request({"path": self.prefix + NAME, "range": [0, self._index_size], "file": str(path)})
        return bool(self._index_size)

    def block(self, name: str, start: int, end: int) -> Path:
        """Return the file with these bytes of a shard, or of its rows. Another process may remove it at any time."""
        request = self._block_request(name, start, end)
        if not (path := Path(request["file"])).exists():
            self._request(request)
        return path

    def copy_ahead(self, blocks: Sequence[tuple[str, int, int]]) -> None:
        """Copy blocks in the background, by a process that exits when this one does. Reading reports failures."""
        requests = [self._block_request(*block) for block in blocks]
        lines = b"".join(json.dumps(each).encode() + b"\n" for each in requests if not os.path.exists(each["file"]))
        if not lines:
            return
        if self._ahead is None:
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            command = [sys.executable, str(REQUESTS), str(NUM_THREADS)]
            process = subprocess.Popen(command, stdin=pipe, stdout=null, stderr=null, start_new_session=True)
            weakref.finalize(self, _stop, process, os.getpid())
            self._ahead, lines = process, self._first_line() + lines
        assert self._ahead.stdin
        with suppress(BrokenPipeError):  # without obstore, which the first request reports
            self._ahead.stdin.write(lines)
            self._ahead.stdin.flush()

    def _block_request(self, name: str, start: int, end: int) -> dict[str, Any]:
        key = json.dumps([self.root, self.prefix, name, self.shards[name], start, end])
        digest = hashlib.sha256(key.encode()).hexdigest()[:32]
        return {
            "path": self.prefix + name,
            "range": [start, end],
            "file": str(self._cache / "blocks" / digest),
            "lock": str(self._cache / "locks" / str(int(digest, 16) % NUM_LOCKS)),
            "limit": self._cache_gb * 1e9,
            **self.row_groups.get((name, start), {}),
        }

    def _first_line(self) -> bytes:
        return json.dumps({"address": self.root, "options": self._options}).encode() + b"\n"

    def _request(self, request: Mapping[str, Any]) -> bytes:
        """Return the answer to a request."""
        # A session of its own, so that a signal to the ranks does not interrupt the request.
        done = subprocess.run(
            [sys.executable, str(REQUESTS)],
            input=self._first_line() + json.dumps(request).encode(),
            capture_output=True,
            start_new_session=True,
        )
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"]
            name = request.get("path", "")
            if done.returncode == NOT_WRITTEN:
                raise ValueError(f"cache_dir={self._cache}: {name} cannot be copied there ({reason[-1]})")
            raise ValueError(f"root={self.root}{name and f' ({name})'} cannot be read: {reason[-1]}")
        return done.stdout


def _stop(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """Stop the process, unless this one was forked from its owner."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
        if process.stdin:
            with suppress(BrokenPipeError):
                process.stdin.close()
