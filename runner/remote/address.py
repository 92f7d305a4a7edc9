"""Addresses in object stores, such as s3://bucket/prefix, and the local directories of their copies."""

from dataclasses import dataclass
from pathlib import Path

from runner.errors import InputError

SCHEMES = ("s3", "gs", "az", "file")  # Amazon S3 and compatible servers, Google Cloud Storage, Azure; a local directory
CACHE = "~/.cache/experiment-runner"  # the default of remote.local_dir


def is_remote(text: object) -> bool:
    """Return True if the text is an address, and not a local path."""
    scheme, separator, _ = str(text).partition("://")
    return bool(separator) and scheme in SCHEMES


@dataclass(frozen=True)
class Address:
    """A prefix of objects in a bucket. The bucket of file:// is empty, and its path is relative to the root."""

    scheme: str
    bucket: str  # or the container of az://
    path: str  # without a slash at its start or end; empty for the whole bucket

    @classmethod
    def parse(cls, text: str, key: str = "outputs") -> "Address":
        """Return the parsed address. Raise InputError, which names the key, if it is no address."""
        scheme, _, rest = text.partition("://")
        bucket, _, path = rest.partition("/")
        parts = [part for part in path.split("/") if part]
        if not is_remote(text) or bool(bucket) == (scheme == "file") or {".", ".."} & {bucket, *parts}:
            example = "file:///DIRECTORY" if scheme == "file" else f"{scheme}://BUCKET/PREFIX"
            raise InputError(f"{key}={text} must be an address without . and .., as in {example}")
        return cls(scheme, bucket, "/".join(parts))

    @property
    def store(self) -> str:
        """The address of the bucket."""
        return f"{self.scheme}://{self.bucket}"

    def __truediv__(self, name: str) -> "Address":
        return Address(self.scheme, self.bucket, "/".join(part for part in (self.path, name.strip("/")) if part))

    def __str__(self) -> str:
        return f"{self.store}/{self.path}".removesuffix("/" if self.bucket else "")

    def local_directory(self, local_dir: str | None) -> Path:
        """Return the directory of the local copy. `local_dir` is the value of remote.local_dir."""
        return Path(local_dir or CACHE).expanduser().absolute() / self.scheme / self.bucket / self.path


def local_outputs(outputs: str, local_dir: str | None) -> Path:
    """Return the local directory in which the runs of `outputs=` are written, whether it is an address or a path."""
    return Address.parse(outputs).local_directory(local_dir) if is_remote(outputs) else Path(outputs).absolute()
