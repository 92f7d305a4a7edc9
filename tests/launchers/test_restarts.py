"""When a world that has failed is started again, and when that is given up."""

import json
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from runner.config.schema import Config
from runner.distributed.environment import RankInfo
from runner.distributed.hung_rank import ENDED
from runner.errors import JobFailed
from runner.launchers import torchrun
from runner.launchers.rank_process import TOLD, Outcome
from runner.launchers.restarts import Start, Told, why_not_again
from runner.launchers.start_again import run_again_while_it_gets_on
from runner.runs.attempts import append_attempt, begin_attempt
from runner.runs.run_directory import Request

DIED = "rank 1 on here died: SIGKILL"


def reach(directory: Path, step: int) -> None:
    (directory / "checkpoints" / f"step_{step}").mkdir(parents=True, exist_ok=True)


def run_world(
    directory: Path, starts: Sequence[tuple[int, str | None]], max_restarts: int
) -> tuple[dict[str, float], list[str | None]]:
    """Starts that reach a step and die of something, or end well. Returns the metrics and each start's directory."""
    begun: list[str | None] = []

    def start(request: Request) -> tuple[Outcome | None, str | None]:
        step, died = starts[len(begun)]
        begun.append(request.directory)
        assert request.tells
        Path(request.tells).write_text(str(directory))
        if step:
            reach(directory, step)
        return (None, died) if died else ({"metrics": {"val/loss": 1.0}}, None)

    try:
        return run_again_while_it_gets_on(start, Request(), max_restarts, []), begun
    except JobFailed as error:
        error.args = (*error.args, len(begun))
        raise


def test_it_goes_on_in_its_directory_as_often_as_it_gets_on(tmp_path: Path) -> None:
    starts = [(5, DIED), (9, DIED), (9, "rank 0 on here died: SIGSEGV"), (12, DIED), (12, None)]
    metrics, begun = run_world(tmp_path, starts, max_restarts=2)
    assert metrics == {"val/loss": 1.0}
    assert begun == [None] + 4 * [str(tmp_path)]


@pytest.mark.parametrize(
    ("starts", "max_restarts", "told", "number"),
    [
        ([(5, DIED)], 0, DIED, 1),
        ([(5, DIED), (5, "rank 0 on here died: SIGKILL")], 1, "launcher.max_restarts=1, and it got no further", 2),
        ([(0, DIED), (0, DIED)], 3, "failed twice in the same way, and got no further than the beginning", 2),
        ([(5, DIED), (9, DIED), (9, DIED)], 3, "failed twice in the same way, and got no further than step 9", 3),
    ],
)
def test_it_is_given_up_where_it_gets_nowhere(
    starts: list[tuple[int, str | None]],
    max_restarts: int,
    told: str,
    number: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(JobFailed, match=told) as raised:
        run_world(tmp_path, starts, max_restarts)
    assert raised.value.args[1] == number
    assert told in capfd.readouterr().err


HUNG = f"rank 0 on here:\nno word from rank 1 on here, it hangs at this line; {ENDED}"


@pytest.mark.parametrize(
    ("exit_code", "received", "error"),
    [(TOLD, ["SIGTERM"], "rank 0 on here:\nNo space left"), (TOLD, [], ""), (-signal.SIGKILL, [], HUNG)],
)
def test_what_a_rank_has_told_is_the_failure_whatever_else_came(
    exit_code: int,
    received: list[str],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """An agent learns a rank's exit status alone: of one that told its failure, or that the others ended."""

    def launch(config: object, run: object) -> object:
        def ranks(config: Config, request: Request, *others: object) -> None:
            if error:
                assert request.tells
                Path(request.tells).write_text(str(tmp_path))
                (tmp_path / "result.json").write_text(json.dumps({"state": "failed", "error": error}))
            raise ChildFailedError("ranks", {1: ProcessFailure(1, 12345, exit_code, "")})

        return ranks

    monkeypatch.setattr(torchrun, "elastic_launch", launch)
    monkeypatch.setattr(torchrun, "start_fork_server", lambda *modules: None)
    monkeypatch.setattr(torchrun, "passing_signals_on", lambda is_guest: nullcontext(received))
    with pytest.raises(JobFailed) as raised:
        torchrun.Torchrun().launch(Config, Request(), RankInfo(0, 0, 1, 1))
    assert str(raised.value) == (error or "a rank has told why")
    assert "died" not in capfd.readouterr().err


def test_a_rank_that_the_others_ended_is_told_as_hung_and_not_as_killed(capfd: pytest.CaptureFixture[str]) -> None:
    hangs = iter([HUNG, HUNG.replace("this line", "another line")])
    with pytest.raises(JobFailed, match="max_restarts=1"):  # two hangs are two ways to fail
        run_again_while_it_gets_on(lambda request: ({"failed": next(hangs)}, DIED), Request(), 1, [])
    assert "died" not in capfd.readouterr().err


def test_another_rank_may_be_first_to_tell_the_same_failure_and_other_failures_may_end_alike() -> None:
    def start(rank: int, error: str, pid: int) -> Start:
        calls = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
        silent = f"no word from rank 3 on here: its process {pid} has ended"
        return Start(5, f"rank {rank} on here:\n{calls}RuntimeError: {error}\nFor debugging, see there\n{silent}")

    first, again, other = start(0, "out of range", 7), start(1, "out of range", 8), start(0, "uncorrectable", 9)
    assert "twice in the same way" in (why_not_again([first, again], 5, 9) or "")
    assert why_not_again([first, other], 5, 9) is None


def test_what_an_earlier_start_has_told_is_not_told_of_this_one(tmp_path: Path) -> None:
    told = Told(lambda: str(tmp_path))
    assert told.failure() == ""
    (tmp_path / "result.json").write_text(json.dumps({"state": "failed", "error": "of the first"}))
    assert told.failure() == "of the first"
    told.begin()
    assert told.failure() == ""
    # It has failed before it had trained, and so leaves the record as it was.
    append_attempt(tmp_path, begin_attempt(2, state="failed", error="of the second"))
    assert told.failure() == "of the second"
