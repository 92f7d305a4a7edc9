"""An object store, by obstore. Only this file imports it.

obstore hangs in a process that was forked after its parent had used it, and its blocking calls delay signal handlers.
So only processes that neither fork nor train use a store.
"""

import itertools
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from runner.errors import InputError, require_packages
from runner.remote.address import Address

T = TypeVar("T")

# Options of the HTTP client, which obstore expects apart from those of the store.
CLIENT_OPTIONS = (
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "pool_max_idle_per_host", "proxy_url"),
    *("proxy_ca_certificate", "proxy_excludes", "read_timeout", "root_certificate", "timeout", "user_agent"),
)
ENVIRONMENT = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE_STORAGE", "file": ""}  # prefixes of the variables
_NO_TAG = {"s3": '"0"', "gs": "1", "az": '"0"', "file": '"0"'}  # of no object
_MAX_RETRIES, _RETRY_S = 6, 40.0
_PART_BYTES = 5 * 2**20  # of an upload in parts
_SECRET = re.compile(r"secret|token|password|account_key|(?<!_)access_key$|sas|service_account_key|authorization")
_users: set[int] = set()  # the process that has used a store, of which a forked process has a copy
_NO_OBJECT = re.compile("NoSuchBucket|NoSuchUpload")  # what is missing is not the object
_LAST_RESPONSE = re.compile(r"status code: (\d+)[^:]*(?:.*?<Code>(\w+)</Code>)?", re.DOTALL)
# Why repeating a request does not help, by the code in the response, or by its status.
_PERMANENT = {
    "NoSuchBucket": "the bucket does not exist; create it, or name another one",
    "InvalidAccessKeyId": "the server does not know the access key; set the credentials in {env}_*",
    "SignatureDoesNotMatch": "the secret key is wrong; set the credentials in {env}_*",
    "401": "the credentials are wrong; set those in {env}_*",
    "AccessDenied": "the credentials have no permission for it; grant reading, writing, listing and deleting",
    "403": "the credentials have no permission for it; grant reading, writing, listing and deleting",
}


class StoreError(Exception):
    """A request that failed.

    `is_permanent` is True if it also fails when it is repeated, `is_temporary` if the server was busy or not reached.
    """

    def __init__(self, text: str, is_permanent: bool, is_temporary: bool = False):
        super().__init__(text)
        self.is_permanent, self.is_temporary = is_permanent, is_temporary


class Stale(Exception):
    """An object that another writer has replaced or deleted."""


@dataclass(frozen=True)
class ObjectFacts:
    """An object as `list` returns it."""

    path: str  # relative to the address of the store
    size: int  # bytes
    e_tag: str  # changes with the content


def secret_options(options: Mapping[str, Any], scheme: str, key: str = "remote.options") -> list[str]:
    """Return a message for each option that is a secret, because the configuration of a run is recorded."""
    prefix = ENVIRONMENT[scheme]
    return [
        f"{key}.{name} must not be in the configuration, which is recorded; set the environment variable "
        f"{prefix}_{name.upper().removeprefix(f'{prefix}_')}"
        for name in options
        if _SECRET.search(name.lower())
    ]


class ObjectStore:
    """The objects below an address. All paths are relative to it.

    Every method raises StoreError, which names the address, if a request fails. A request is repeated for up to
    40 seconds if the server is busy or the connection is lost.

    Attributes:
        num_retries: how many requests were repeated. obstore itself repeats downloads and the parts of large uploads,
            and does not count them.

    Args:
        address: the prefix of all objects.
        options: those of obstore, for example endpoint, region and allow_http. obstore reads others, such as
            AWS_ACCESS_KEY_ID, from the environment.
        key: the key of the configuration that messages name.

    Raises:
        InputError: if obstore is missing, or if an option is unknown or missing.
    """

    def __init__(self, address: Address, options: Mapping[str, Any] | None = None, key: str = "outputs"):
        self.address, self.key, self.num_retries = address, key, 0
        require_packages(f"{key}={address}", "remote", "obstore")
        import obstore
        from obstore import store

        self._obstore = obstore
        texts = {name: value for name, value in (options or {}).items() if value is not None}
        client = {name: texts.pop(name) for name in CLIENT_OPTIONS if name in texts}
        given: dict[str, Any] = texts
        if client:  # an empty mapping would hide the environment, such as AWS_ALLOW_HTTP
            given["client_options"] = client

        def connect(max_retries: int) -> Any:
            retries = {"max_retries": max_retries, "retry_timeout": timedelta(seconds=_RETRY_S)}
            return store.from_url(
                address.store, **({} if address.scheme == "file" else given | {"retry_config": retries})
            )

        try:
            self._store, self._bulk_store = connect(0), connect(_MAX_RETRIES)
        except (obstore.exceptions.BaseError, ValueError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(
                f"{key}={address}: {reason}; correct remote.options, or set it in the environment"
            ) from None

    def put(self, path: str, content: bytes | Path) -> None:
        """Create or replace an object. It is visible only when it is complete.

        A large file is uploaded in parts. Raise FileNotFoundError if the local file does not exist.
        """
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        store = self._store if size <= _PART_BYTES else self._bulk_store
        self._request(lambda: self._obstore.put(store, self._full(path), content, chunk_size=_PART_BYTES))

    def create(self, path: str, content: bytes) -> bool:
        """Create an object. Return False if it exists with another content.

        A request that is repeated because its response was lost finds its own object, so the contents are compared. The
        content of a lock must be unique to its writer.
        """
        try:
            self._request(lambda: self._obstore.put(self._store, self._full(path), content, mode="create"))
        except Stale:
            return self.get(path) == content
        return True

    def replace(self, path: str, content: bytes, e_tag: str) -> str:
        """Replace the object that has this e_tag. Return the new e_tag. Raise Stale if it has changed or is missing."""
        full = self._full(path)

        def put() -> Any:
            if self.address.scheme != "file":
                mode: Any = {"version" if self.address.scheme == "gs" else "e_tag": e_tag}
                return self._obstore.put(self._store, full, content, mode=mode)
            # obstore has no compare-and-swap for files: nearly atomic
            if self._tag(self._obstore.head(self._store, full)) != e_tag:
                raise Stale(path)
            return self._obstore.put(self._store, full, content)

        try:
            result = self._request(put)
        except (Stale, FileNotFoundError):
            if (found := self.find(path)) and self.get(path) == content:
                return found  # the response to the first of two equal requests was lost
            raise Stale(path) from None
        return self._tag(result)

    def find(self, path: str) -> str | None:
        """Return the e_tag of an object, or None if it does not exist."""
        try:
            return self._tag(self._request(lambda: self._obstore.head(self._store, self._full(path))))
        except FileNotFoundError:
            return None

    def get(self, path: str) -> bytes | None:
        """Return the content of an object, or None if it does not exist."""
        try:
            return bytes(self._request(lambda: self._obstore.get(self._store, self._full(path)).bytes()))
        except FileNotFoundError:
            return None

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """Return a part of an object. Raise FileNotFoundError if it does not exist."""
        with self._translated():
            return self._obstore.get_range(self._bulk_store, self._full(path), start=start, length=length).to_bytes()

    def download(self, path: str, file: Path) -> None:
        """Write an object to a new file. Raise FileNotFoundError if the object does not exist."""
        with self._translated():
            response = self._obstore.get(self._bulk_store, self._full(path))
            with file.open("xb") as out:
                for chunk in response.stream(min_chunk_size=4 * 2**20):
                    out.write(chunk)

    def list(self, prefix: str = "") -> list[ObjectFacts]:
        """Return all objects whose paths start with the directories `prefix`, in the order of their paths."""
        full = self._full(prefix)
        skipped = len(self.address.path) + 1 if self.address.path else 0
        found = self._request(lambda: [each for page in self._obstore.list(self._store, full or None) for each in page])
        facts = [ObjectFacts(each["path"][skipped:], each["size"], each["e_tag"] or "") for each in found]
        return sorted(facts, key=lambda each: each.path)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete the objects, in order; those that do not exist are ignored."""
        for path in paths:
            try:
                self._request(partial(self._obstore.delete, self._store, self._full(path)))
            except FileNotFoundError:
                continue

    def check_writable(self) -> None:
        """Raise InputError if objects cannot be created, read and deleted, or if conditional writes are ignored.

        A store that ignores them lets two runs write to one directory, each of which has locked it. Raise StoreError if
        the store does not answer.
        """
        probe = f".probe-{uuid.uuid4().hex}"
        try:
            works = self.create(probe, b"first") and not self.create(probe, b"second")
            works = works and _raises_stale(lambda: self.replace(probe, b"third", _NO_TAG[self.address.scheme]))
            self.delete([probe])
        except StoreError as error:
            if not error.is_permanent:
                raise
            raise InputError(str(error)) from None
        if not works:
            raise InputError(
                f"{self.key}={self.address}: the store ignores conditional writes (If-None-Match), without which two "
                "runs can overwrite each other; use another store, or a local directory"
            )

    def _tag(self, facts: Mapping[str, Any]) -> str:
        """Return what conditional writes compare: the generation of an object in Google's store, or else its e_tag."""
        return facts["version" if self.address.scheme == "gs" else "e_tag"] or ""

    def _full(self, path: str) -> str:
        return "/".join(part for part in (self.address.path, path) if part)

    def _request(self, function: Callable[[], T]) -> T:
        """Return what the function returns; repeat it while the failure is temporary. Raise as `_translated`."""
        deadline = time.monotonic() + _RETRY_S
        for number in itertools.count():
            try:
                with self._translated():
                    return function()
            except StoreError as error:
                if not error.is_temporary or number == _MAX_RETRIES or time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(0, 0.1 * 2**number))
            self.num_retries += 1
        raise AssertionError

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise FileNotFoundError for a missing object, Stale for a failed condition, StoreError for other failures."""
        errors = self._obstore.exceptions
        _users.add(os.getpid())
        if len(_users) > 1:
            raise StoreError(
                f"{self.key}={self.address}: a process that was forked after its parent had used an object store "
                "cannot use one; start it by spawn or forkserver",
                is_permanent=True,
            )
        try:
            yield
        except (errors.AlreadyExistsError, errors.PreconditionError) as error:
            raise Stale(str(error).splitlines()[0]) from None
        except (errors.BaseError, OSError) as error:
            if isinstance(error, FileNotFoundError) and not _NO_OBJECT.search(str(error)):
                raise
            raise self._explained(error) from None

    def _explained(self, error: Exception) -> StoreError:
        text = str(error)
        status, code = found.groups() if (found := _LAST_RESPONSE.search(text)) else (None, None)
        reason = _PERMANENT.get(code or "") or _PERMANENT.get(status or "")
        if "169.254.169.254" in text or "metadata" in text:  # the address at which machines of a cloud find theirs
            reason = "there are no credentials; set them in {env}_*"
        shown = reason.format(env=ENVIRONMENT[self.address.scheme]) if reason else text.splitlines()[0]
        is_temporary = isinstance(error, self._obstore.exceptions.GenericError) and (
            status is None or status[0] == "5" or status in ("408", "429")
        )
        # If the response that completes an upload is lost, the repeated request does not find the upload.
        is_temporary |= "NoSuchUpload" in text
        return StoreError(f"{self.key}={self.address}: {shown}", reason is not None, is_temporary and reason is None)


def _raises_stale(function: Callable[[], T]) -> bool:
    try:
        function()
    except Stale:
        return True
    return False
