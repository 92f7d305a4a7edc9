"""A program that sends requests to an object store. Standard input contains JSON, one object a line.

The first line has the address and the options of the store; each further line is a request. A process of its own,
because obstore hangs in a process that was forked after its parent had used it, as the workers of a loader are. If a
request fails, the program writes a line to standard error and exits with status 1, or with status 2 if the file cannot
be written. With a number of threads as its argument, it ignores failures, and exits at the end of the input.
"""

import fcntl
import json
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

CLIENT = (
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "pool_max_idle_per_host", "proxy_url"),
    *("proxy_ca_certificate", "proxy_excludes", "read_timeout", "root_certificate", "timeout", "user_agent"),
)
RETRIES = {"max_retries": 6, "retry_timeout": timedelta(seconds=40)}
MISSING = "it needs obstore; pip install 'experiment-runner[remote]'"
FAILED, NOT_WRITTEN = 1, 2  # exit status


class NotWritten(Exception):
    """A file could not be written."""


def main() -> tuple[int, str]:
    """Answer the requests: a list of [path, size, e_tag], or a file with bytes of an object.

    Return the exit status, and the reason of a failure.
    """
    try:
        import obstore  # noqa: F401
    except ImportError:
        return FAILED, MISSING
    try:
        store = _open(**json.loads(sys.stdin.readline()))
        if len(sys.argv) > 1:
            pool = ThreadPoolExecutor(int(sys.argv[1]))
            for line in sys.stdin:
                pool.submit(answer, store, json.loads(line))
            return 0, ""  # without waiting for requests in progress
        for line in sys.stdin:
            answer(store, json.loads(line))
    except NotWritten as error:
        return NOT_WRITTEN, str(error)
    except Exception as error:  # obstore has one class per kind of store and failure
        text = " ".join(str(error).split())[:300] or type(error).__name__
        if "169.254.169.254" in text or "metadata" in text:  # where machines of a cloud find credentials
            text = "there are no credentials; set them in the environment, such as AWS_ACCESS_KEY_ID"
        return FAILED, text
    return 0, ""


def answer(store: Any, request: dict[str, Any]) -> None:
    """Print the objects for a request without a path, or else copy parts of an object to a file."""
    import obstore

    if "path" not in request:
        found = [entry for page in obstore.list(store) for entry in page]
        print(json.dumps([[entry["path"], entry["size"], entry["e_tag"] or ""] for entry in found]))
        return
    file, (start, end) = Path(request["file"]), request["range"]
    with locked(Path(request["lock"])) if "lock" in request else nullcontext():
        if "lock" in request and file.exists():
            return
        get = _get_rows if "group" in request else _get
        content = get(store, request)
        try:
            if "limit" in request:
                remove_oldest(file.parent, request["limit"] - (end - start))
            write(file, content)
        except OSError as error:
            raise NotWritten(error.strerror) from None


def _get(store: Any, request: dict[str, Any]) -> Any:
    import obstore

    start, end = request["range"]
    return obstore.get_range(store, request["path"], start=start, end=end)


def _get_rows(store: Any, request: dict[str, Any]) -> bytes:
    """Return the rows of a row group of Parquet, one after the other."""
    from parquet import read_rows  # type: ignore[import-not-found]  # beside this program, which has no package

    with tempfile.TemporaryFile() as sparse:  # only the row group and the metadata
        sparse.truncate(request["size"])
        for part in request["parts"]:
            os.pwrite(sparse.fileno(), _get(store, {**request, "range": part}), part[0])
        return b"".join(value for row in read_rows(sparse, request["group"]) for value in row.values())


def remove_oldest(directory: Path, limit: float) -> None:
    """Remove the files that were written first, until the others have at most `limit` bytes."""
    entries = []
    for entry in os.scandir(directory):
        with suppress(FileNotFoundError):  # another process has removed it
            entries.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
    excess = sum(size for _, size, _ in entries) - limit
    for _, size, path in sorted(entries):
        if excess <= 0:
            return
        Path(path).unlink(missing_ok=True)
        excess -= size


def write(path: Path, content: Any) -> None:
    """Write a file that is complete or absent at any time. Raise OSError if it cannot be written."""
    partial = path.with_name(f".partial-{uuid.uuid4().hex}")
    try:
        partial.write_bytes(content)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Exclude the other processes of this machine, and other threads, from contexts of the same path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open(address: str, options: dict[str, Any]) -> Any:
    from obstore.store import from_url

    if address.startswith("file:"):
        return from_url(address)
    options = {name: value for name, value in options.items() if value is not None}
    client: Any = {name: options.pop(name) for name in CLIENT if name in options}
    settings: dict[str, Any] = {**options, "retry_config": RETRIES}
    if client:  # an empty mapping would hide the environment, such as AWS_ALLOW_HTTP
        settings["client_options"] = client
    return from_url(address, **settings)


if __name__ == "__main__":
    status, reason = main()
    print(reason, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)  # without the destructors of threads of obstore and pyarrow, which may abort the process
