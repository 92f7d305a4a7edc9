"""The mirror of a run at an address, in a job whose ranks may form one world after another."""

from collections.abc import Iterator
from contextlib import contextmanager

from runner.config.schema import Config
from runner.distributed.failures.peer_failure import PeerMissing
from runner.distributed.membership import Regroup
from runner.distributed.world import World
from runner.distributed.world_store import RanksMissing
from runner.errors import InputError, quantity
from runner.remote.address import is_remote
from runner.remote.mirror_process import MirrorProcess, report_left


class JobMirror:
    """The process that mirrors the run on each machine if `outputs=` is an address.

    It continues while the ranks of a job form another world, so that they need not wait until all is uploaded.
    """

    def __init__(self) -> None:
        self._process: MirrorProcess | None = None

    @contextmanager
    def running(self, config: Config, world: World) -> Iterator[MirrorProcess | None]:
        """Start the process, unless an earlier world has. All ranks must call it.

        At the end of the job, wait until all is uploaded, or until the store has failed for remote.patience_s. Raise
        InputError if the store cannot be used, and JobFailed if the run ended well but files could not be uploaded.
        """
        if not is_remote(config.outputs):
            yield None
            return
        is_successful, goes_on = False, False
        try:
            self._start(config, world)
            yield self._process
            is_successful = True
        except (Regroup, PeerMissing, RanksMissing):
            goes_on = world.membership is not None and world.membership.has_begun
            raise
        finally:
            if not goes_on:
                self.end(world, is_successful)

    def _start(self, config: Config, world: World) -> None:
        refused = list[str]()
        if world.rank_info.local_rank == 0 and self._process is None:
            try:
                self._process = MirrorProcess(config.outputs, config.remote.options or {}, config.remote.patience_s)
            except InputError as error:
                refused = error.messages
        with world.consensus.waiting_longer(config.remote.patience_s):
            refused = world.consensus.first_error("mirror", refused)
        if refused:
            raise InputError(*refused)

    def end(self, world: World, is_successful: bool = False) -> None:
        """Upload what is left, and end the process if there is one. Raise JobFailed as `running` does."""
        process, self._process = self._process, None
        if process is not None:
            left = process.end()
            if world.rank == 0 and (num := process.num_retries):
                print(f"repeated {quantity(num, 'request')} to {process.outputs}", flush=True)
            report_left(left, is_successful)
