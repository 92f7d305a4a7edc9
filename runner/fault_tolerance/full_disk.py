"""A disk that does not take a checkpoint: it is asked before, and told in three lines."""

import errno
import shutil
from pathlib import Path

from runner.errors import JobFailed


def check_space(folder: Path, needed: int) -> None:
    """Raises OSError where there are fewer bytes free than needed."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{free / 2**20:,.1f} MiB are free, {needed / 2**20:,.1f} MiB are needed")


def explained(error: BaseException, partial: Path) -> BaseException:
    """What the disk did not take, or that a rank is silent, without a traceback; another error as it is."""
    if not isinstance(error, OSError):
        return error
    if isinstance(error, TimeoutError) and error.errno is None:  # a rank is silent; it, or who misses it, may say why
        return JobFailed(f"checkpoint {partial.with_suffix('')}: {error}", follows=True)
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    mend = "free space there, or keep fewer (checkpoint.keep), and resume" if is_full else "mend that, and resume"
    return JobFailed(
        f"checkpoint {partial.with_suffix('')} could not be written: {error.strerror or repr(error)}\n"
        f"the older ones are as they were; {mend}"
    )
