"""Shards in an object store, whose blocks are copied into a bounded directory when they are first read."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .index import ENDINGS, NAME, locked

REQUESTS = Path(__file__).with_name("requests.py")
NUM_LOCKS = 64
_SECRET = re.compile(r"secret|token|password|account_key|(?<!_)access_key$|sas|service_account_key|authorization")


class RemoteShards:
    """The shards of a split at an address. Each block is requested once per machine, unless it was removed since.

    Raises ValueError if an option is a secret, or if the address cannot be read or has no shards of the split; all
    methods if a request fails.
    """

    def __init__(self, root: str, split: str, options: Mapping[str, Any], cache: Path, cache_gb: float):
        if secrets := [name for name in options if _SECRET.search(name.lower())]:
            raise ValueError(
                f"remote_options.{secrets[0]} must not be in the configuration, which is recorded; set it in the "
                "environment"
            )
        self.root, self._options, self._cache, self._cache_gb = root, dict(options), cache, cache_gb
        with tempfile.TemporaryFile() as file:
            self._request({}, file)
            file.seek(0)
            found = json.load(file)
        prefix = f"{split}/" if any(path.startswith(f"{split}/") for path, _, _ in found) else ""
        if split != "train" and not prefix:
            raise ValueError(f"root={root}: the {split} split needs shards in {root}/{split}, which does not exist")
        paths = {path[len(prefix) :]: (size, e_tag) for path, size, e_tag in found if path.startswith(prefix)}
        self.prefix, self._index_size = prefix, paths.get(NAME, (0, ""))[0]
        self.shards = {name: paths[name] for name in sorted(paths) if "/" not in name and name.endswith(ENDINGS)}
        if not self.shards:
            raise ValueError(f"root={root}: {prefix or 'the address'} has no shards ({' or '.join(ENDINGS)})")

    def copies(self) -> Iterator[tuple[str, Path, str]]:
        """Yield the name, a temporary copy and the e_tag of each shard."""
        for name, (size, e_tag) in self.shards.items():
            path = self._fetch(name, 0, size, self._cache / f"{os.getpid()}.shard")
            try:
                yield name, path, e_tag
            finally:
                path.unlink()

    def copy_index(self, path: Path) -> bool:
        """Copy the index that is stored beside the shards. Return False if it does not exist."""
        return bool(self._index_size and self._fetch(NAME, 0, self._index_size, path))

    def block(self, name: str, start: int, end: int) -> Path:
        """Return the file with these bytes of a shard. Another process may remove it at any time."""
        key = json.dumps([self.root, self.prefix, name, self.shards[name], start, end])
        digest = hashlib.sha256(key.encode()).hexdigest()[:32]
        path = self._cache / "blocks" / digest
        if not path.exists():
            with locked(self._cache / "locks" / str(int(digest, 16) % NUM_LOCKS)):
                if not path.exists():
                    path.parent.mkdir(exist_ok=True)
                    self._remove_oldest(path.parent, end - start)
                    self._fetch(name, start, end, path)
        return path

    def _remove_oldest(self, directory: Path, needed: int) -> None:
        """Remove the blocks that were copied first, until there is space for another one."""
        entries = []
        for entry in os.scandir(directory):
            with suppress(FileNotFoundError):  # another process has removed it
                entries.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        excess = needed + sum(size for _, size, _ in entries) - self._cache_gb * 1e9
        for _, size, path in sorted(entries):
            if excess <= 0:
                return
            Path(path).unlink(missing_ok=True)
            excess -= size

    def _fetch(self, name: str, start: int, end: int, path: Path) -> Path:
        """Copy bytes of an object to a file, which is complete or absent at any time."""
        try:
            with tempfile.NamedTemporaryFile(dir=self._cache, prefix=".partial-", delete=False) as file:
                try:
                    self._request({"path": self.prefix + name, "range": [start, end]}, file)
                    os.rename(file.name, path)
                finally:
                    Path(file.name).unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(f"cache_dir={self._cache}: {name} cannot be copied there ({error.strerror})") from None
        return path

    def _request(self, request: Mapping[str, Any], file: Any) -> None:
        message = json.dumps({"address": self.root, "options": self._options, **request})
        # A session of its own, so that a signal to the ranks does not interrupt the request.
        done = subprocess.run(
            [sys.executable, str(REQUESTS)],
            input=message.encode(),
            stdout=file,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"]
            place = f" ({request['path']})" if request else ""
            raise ValueError(f"root={self.root}{place} cannot be read: {reason[-1]}")
