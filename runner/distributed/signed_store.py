"""Signed values in the ranks' store, which every user who finds its port can read and write."""

import hashlib
import hmac
import logging
import os
import secrets
import time
from pathlib import Path

import torch.distributed as dist

log = logging.getLogger(__name__)
TAG_LENGTH = 64  # hexadecimal digits of SHA-256
ignored: dict[str, set[bytes]] = {}  # hashes of the values that this process has ignored in this job, by key


class SignedStore(dist.PrefixStore):
    """The keys of a store under a path, with signed values. A key whose value has another signature counts as missing.

    The signature covers path, key and value, so that a value cannot be copied to another key. A PrefixStore of this
    store does not sign its values.
    """

    def __init__(self, path: str, store: dist.Store, secret: bytes):
        super().__init__(path, store)
        self.path, self.secret = path, secret

    def set(self, key: str, value: str) -> None:
        super().set(key, self._signed(key, value.encode()).decode())

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        deadline = time.monotonic() + self.timeout.total_seconds()  # type: ignore[attr-defined]
        while len(values := self._verified(keys, super().multi_get(keys))) < len(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"no signed values of {keys} in {self.path}")
            time.sleep(0.02)
        return values

    def check(self, keys: list[str]) -> bool:
        return super().check(keys) and len(self._verified(keys, super().multi_get(keys))) == len(keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set the key if it is missing, and return its value. expected_value must be empty."""
        signed = self._signed(key, desired_value.encode()).decode()
        while not (values := self._verified([key], [super().compare_set(key, expected_value, signed)])):
            self.delete_key(key)
        return values[0]

    def clone(self) -> "SignedStore":
        return SignedStore(self.path, self.underlying_store.clone(), self.secret)

    def _signed(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self.secret, f"{self.path}/{key}\0".encode() + value, "sha256").hex().encode() + value

    def _verified(self, keys: list[str], found: list[bytes]) -> list[bytes]:
        """Return the values with a valid signature, without it."""
        values = []
        for key, signed in zip(keys, found, strict=True):
            if hmac.compare_digest(signed, self._signed(key, signed[TAG_LENGTH:])):
                values.append(signed[TAG_LENGTH:])
                continue
            if (name := f"{self.path}/{key}") not in ignored:
                log.warning("ignored an unsigned value of %s in the ranks' store: another user may have set it", name)
            ignored.setdefault(name, set()).add(hashlib.sha256(signed).digest())
        return values


def report_ignored() -> None:
    """Log the number of different values that this process has ignored since the last call, if there are any."""
    if counts := [len(values) for values in tuple(ignored.values())]:
        log.warning("ignored %d unsigned values of %d keys in the ranks' store", sum(counts), len(counts))
    ignored.clear()


def below(name: str, store: dist.Store) -> dist.Store:
    """Return the keys of a store under `name`, signed if those of the store are."""
    if isinstance(store, SignedStore):
        return SignedStore(f"{store.path}/{name}", store.underlying_store, store.secret)
    return dist.PrefixStore(name, store)


def publish_secret(store: dist.TCPStore, key: str) -> None:
    """Create a secret that this user's processes on this machine can read until this process exits. Linux only."""
    file = os.memfd_create(f"{key}-{store.port}")
    os.write(file, secrets.token_bytes(32))
    store.set(key, f"{os.getpid()}/{file}")


def read_secret(store: dist.TCPStore, key: str) -> bytes | None:
    """Return the published secret; None if it is missing or forged: other users cannot create such a file."""
    try:
        pid, number = map(int, store.get(key).split(b"/") if store.check([key]) else ())
        path = Path(f"/proc/{pid}/fd/{number}")
        is_own = os.readlink(path) == f"/memfd:{key}-{store.port} (deleted)" and path.stat().st_uid == os.geteuid()
        return path.read_bytes() if is_own else None
    except (OSError, ValueError):
        return None
