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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
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


def main() -> None:
    """Answer the requests: a list of [path, size, e_tag], or the path of a file with bytes of an object."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        sys.exit(MISSING)
    opened = json.loads(sys.stdin.readline())
    if len(sys.argv) > 1:
        pool = ThreadPoolExecutor(int(sys.argv[1]))
        for line in sys.stdin:
            pool.submit(answer, opened, json.loads(line))
        os._exit(0)  # without waiting for requests in progress
    for line in sys.stdin:
        try:
            answer(opened, json.loads(line))
        except OSError as error:
            print(error.strerror or error, file=sys.stderr)
            sys.exit(NOT_WRITTEN)
        except Exception as error:  # obstore has one class per kind of store and failure
            text = " ".join(str(error).split())[:300] or type(error).__name__
            if "169.254.169.254" in text or "metadata" in text:  # where machines of a cloud find credentials
                text = "there are no credentials; set them in the environment, such as AWS_ACCESS_KEY_ID"
            sys.exit(text)


def answer(opened: dict[str, Any], request: dict[str, Any]) -> None:
    """Print the objects for a request without a path, or else copy a range of the bytes of an object to a file."""
    import obstore

    store = _open(**opened)
    if "path" not in request:
        found = [entry for page in obstore.list(store) for entry in page]
        print(json.dumps([[entry["path"], entry["size"], entry["e_tag"] or ""] for entry in found]))
        return
    start, end = request["range"]

    def get() -> Any:
        try:
            return obstore.get_range(store, request["path"], start=start, end=end)
        except OSError as error:  # of file://
            raise RuntimeError(str(error)) from None

    file = Path(request["file"])
    if "lock" not in request:
        write(file, get())
        return
    with locked(Path(request["lock"])):
        if not file.exists():
            remove_oldest(file.parent, request["limit"] - (end - start))
            write(file, get())


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
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".partial-", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.rename(file.name, path)
        finally:
            Path(file.name).unlink(missing_ok=True)


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
    main()
