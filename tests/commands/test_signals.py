"""Signals at any moment of a command, to whichever of its processes: it has saved, and nothing is left."""

import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import TORCHRUN, Commands, by_age, free_port, parent_of, wait_until
from own_folders import write_files
from worlds import Run, run

# A user's own model, which waits at one place until a file is there.
WAITING = {
    "mine/mine.py": """\
        import os
        import signal
        import time

        from models.mlp import MLP

        RANK = os.environ.get("RANK", "0")


        class Waiting(MLP):
            def __init__(self, at="nowhere", **options):
                super().__init__(**options)
                self.at, self.calls = at, 0
                if at == "build":
                    self.wait()

            def forward(self, samples):
                self.calls += self.training
                place = "step" if self.training else "evaluation"
                if self.at == place and (self.calls >= 5 if self.training else len(samples) > 1):
                    if place == "step" and self.calls == 5:
                        self.note_signals()
                    self.wait()
                return super().forward(samples)

            def note_signals(self):
                for number in map(signal.Signals.__getitem__, ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP", "SIGQUIT")):
                    if callable(handler := signal.getsignal(number)):
                        signal.signal(number, lambda *told, handler=handler: (handler(*told), self.note()))

            def note(self):
                open(f"told-{RANK}", "w").close()

            def wait(self):
                open(f"ready-{RANK}", "w").close()
                while not os.path.exists("go"):
                    time.sleep(0.02)
        """,
    "mine/model/waiting.yaml": """\
        defaults:
          - mlp
        _target_: mine.Waiting
        at: nowhere
        """,
    # Whatever asks for torch waits as long.
    "site/sitecustomize.py": """\
        import os
        import sys
        import time


        class Waiting:
            def find_spec(name, path=None, target=None):
                if name == "torch" and "runner.distributed.signals" in sys.modules:
                    open(f"ready-{os.environ.get('RANK', '0')}", "w").close()
                    while not os.path.exists("go"):
                        time.sleep(0.02)


        sys.meta_path.insert(0, Waiting)
        """,
}
SMALL = ("threads=1", "logger=none", "epochs=2", "batch_size=256")
TINY = ("--config-dir=mine", "model=waiting", *SMALL)
LOADED = ("loader.num_workers=2",)
SPREAD = (*TINY, "parallel=ddp")
WAYS = {
    "alone": (),
    "torchrun": (),
    "spawn": ("launcher=spawn",),
    "agent": ("launcher=torchrun", "launcher.max_restarts=1"),
    "hand": (),
}


@pytest.fixture(autouse=True)
def none_ignored() -> Iterator[None]:
    """As the tests' own process may ignore them, under nohup, and all that it starts."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGQUIT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def begun(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., "list[subprocess.Popen[str]]"]:
    """Starts a command that waits at the place; returns its process, or those of ranks that were started by hand."""

    monkeypatch.chdir(tmp_path)  # for ranks that the test itself forks

    def begin(way: str, place: str, *words: str) -> "list[subprocess.Popen[str]]":
        write_files(tmp_path, WAITING)
        env = commands.with_path(tmp_path / "site") if place == "import" else {}
        words = ("-m", "runner", *(TINY if way == "alone" else SPREAD), *WAYS[way], f"model.at={place}", *words)
        if way == "torchrun":
            words = (*TORCHRUN, "--nproc-per-node=2", f"--master-port={free_port()}", *words)
        worlds = [{}]
        if way == "hand":
            shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            worlds = [{**shared, "RANK": str(rank)} for rank in range(2)]
        processes = [commands.start(*words, env={**env, **world}) for world in worlds]
        ranks = 1 if way == "alone" or (place == "import" and way in ("spawn", "agent")) else 2
        wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(ranks)), processes[0])
        return processes

    return begin


def ranks_of(commands: Commands, process: "subprocess.Popen[str]") -> list[int]:
    """The ranks' processes, by rank: those that the fork server or torchrun has made, without their workers."""
    living = commands.living(process)
    environ = {pid: dict(line.partition("=")[::2] for line in read(pid, "environ").split("\0")) for pid in living}
    parents = {pid: parent_of(pid) for pid in living}
    servers = [pid for pid in living if "forkserver" in read(pid, "cmdline")]
    if servers:  # in the order in which they were forked
        return sorted((pid for pid in living if parents[pid] in servers), key=by_age)
    return sorted((pid for pid in living if parents[pid] == process.pid), key=lambda pid: environ[pid]["RANK"])


def read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(errors="replace")


def send(number: signal.Signals, receiver: str, commands: Commands, processes: "list[subprocess.Popen[str]]") -> None:
    """To the process that was started, its whole group, or one rank."""
    first = processes[0]
    if receiver == "group":
        os.killpg(first.pid, number)
    elif receiver == "rank" and len(processes) == 1:
        os.kill(ranks_of(commands, first)[1], number)
    else:
        processes[-1 if receiver == "rank" else 0].send_signal(number)


def told(folder: Path, ranks: int) -> Callable[[], bool]:
    """Whether each of them, which wait in a step, has been told of a signal."""
    return lambda: all((folder / f"told-{rank}").exists() for rank in range(ranks))


def only_run(tmp_path: Path) -> Run:
    (path,) = (tmp_path / "outputs" / "run").iterdir()
    return Run(path)


thorough, soak = pytest.mark.thorough, pytest.mark.soak
SAVED = [
    ("spawn", "HUP", "group", ""),
    *(
        pytest.param(*case, marks=thorough)
        for case in (
            ("alone", "HUP", "parent", "loaded"),
            ("agent", "QUIT", "parent", "loaded"),
            ("torchrun", "USR1", "rank", "loaded"),
        )
    ),
    *(
        pytest.param(way, number, receiver, loaded, marks=soak)
        for way in ("spawn", "agent", "torchrun")
        for number in ("TERM", "USR1", "HUP", "INT", "QUIT")
        for receiver in ("parent", "group", "rank")
        for loaded in ("", "loaded")
    ),
]


@pytest.mark.fault("a signal while training", outcome="survived")
@pytest.mark.parametrize(("way", "number", "receiver", "loaded"), SAVED)
def test_a_run_that_is_asked_to_stop_has_saved_and_goes_on_to_the_same_weights(
    way: str, number: str, receiver: str, loaded: str, begun: Callable, commands: Commands, tmp_path: Path
) -> None:
    ranks = 1 if way == "alone" else 2
    processes = begun(way, "step", *(LOADED if loaded else ()))
    send(signal.Signals[f"SIG{number}"], receiver, commands, processes)
    asked_agent = way == "torchrun" and receiver != "rank"
    if receiver == "parent" and not (asked_agent and number == "USR1"):  # which it passes on
        wait_until(told(tmp_path, ranks), processes[0])
    (tmp_path / "go").touch()
    (done,) = [commands.finish(process) for process in processes]
    said, one = done.stdout + done.stderr, only_run(tmp_path)
    if way != "torchrun":  # whose status is its own
        assert done.returncode == 143, said
        assert done.stderr == ""
    if asked_agent and number == "USR1":  # which torchrun does not know, and dies of
        noticed = "the process that started this rank has ended|a signal to another rank"  # by whichever rank
        is_over = one.result["state"] == "finished"  # before a rank has looked for its parent
        assert is_over or re.search(f"({noticed}): saved after step", said), said
        if is_over:
            wait_until(lambda: commands.living(processes[0]) == [])
            return
    else:
        assert "saved after step" in said or number == "HUP", said
    wait_until(lambda: commands.living(processes[0]) == [])
    assert one.result["state"] == "preempted" and one.result["step"] >= 5, said
    assert one.result["error"] is None
    assert "no word from" not in said and "error:" not in said and "Traceback" not in done.stdout
    spread = () if way == "alone" else ("parallel=ddp",)
    whole = run(tmp_path / "whole", ranks, "model=mlp", *SMALL, *spread, "backend=gloo")
    again = run(tmp_path / "outputs", ranks, f"resume={one.path}", "launcher=env", "backend=gloo")
    assert again.result["weights_sha256"] == whole.result["weights_sha256"]


EARLY = [
    ("alone", "import", "TERM", "parent"),
    *(
        pytest.param(*case, marks=thorough)
        for case in (
            ("hand", "import", "HUP", "rank"),
            ("hand", "build", "TERM", "rank"),
            ("agent", "build", "INT", "group"),
            ("spawn", "build", "TERM", "group"),
        )
    ),
    *(
        pytest.param(way, place, number, receiver, marks=soak)
        for way in ("alone", "spawn", "agent", "hand", "torchrun")
        for place in ("import", "build")
        for number in ("TERM", "USR1", "HUP", "INT", "QUIT")
        for receiver in ("parent", "group", "rank")
        if not (way == "alone" and receiver == "rank")
        if not (place == "import" and receiver == "rank" and way in ("spawn", "agent"))
    ),
]


@pytest.mark.fault("a signal before the run has begun", outcome="refused")
@pytest.mark.parametrize(("way", "place", "number", "receiver"), EARLY)
def test_a_command_that_has_not_begun_ends_at_once_and_has_written_nothing(
    way: str, place: str, number: str, receiver: str, begun: Callable, commands: Commands, tmp_path: Path
) -> None:
    processes = begun(way, place)
    send(signal.Signals[f"SIG{number}"], receiver, commands, processes)
    others = receiver == "rank" or len(processes) > 1 or (way == "torchrun" and number == "USR1")  # which that dies of
    if others:  # which know nothing yet, and come to where they ask
        (tmp_path / "go").touch()
    for process in processes:
        done = commands.finish(process)
        if way != "torchrun":
            assert (done.returncode, done.stdout, done.stderr) == (143, "", "")
    wait_until(lambda: not any(commands.living(process) for process in processes))
    assert not (tmp_path / "outputs").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["alone", "spawn"])
def test_what_does_not_train_has_nothing_to_save(way: str, begun: Callable, commands: Commands, tmp_path: Path) -> None:
    """In a world of two, one rank is asked, and the other one loses it in the middle of a collective."""
    write_files(tmp_path, WAITING)
    trained = run(tmp_path / "outputs", 1, f"--config-dir={tmp_path / 'mine'}", *TINY[1:], "backend=gloo")
    (process,) = begun(way, "evaluation", "task=evaluate", f"run={trained.path}", "backend=gloo")
    send(signal.SIGTERM, "rank" if way == "spawn" else "parent", commands, [process])
    (tmp_path / "go").touch()
    done = commands.finish(process)
    assert (done.returncode, done.stderr) == (143, ""), done.stdout
    (path,) = (path for path in (tmp_path / "outputs" / "run").iterdir() if path != trained.path)
    assert Run(path).result["state"] == "preempted"
    assert f"SIGTERM: stopped; its directory is {path}" in done.stdout


@pytest.mark.fault("a terminal that is closed", outcome="refused")
def test_a_terminal_that_is_closed_takes_no_run_along(commands: Commands, tmp_path: Path) -> None:
    write_files(tmp_path, WAITING)
    leader, follower = pty.openpty()
    words = ("-m", "runner", *TINY, "model.at=step")
    # setsid makes the terminal its own, so that it has a SIGHUP when that goes.
    process = commands.start("-c", AT_TERMINAL, os.ttyname(follower), *words)
    os.close(follower)
    wait_until((tmp_path / "ready-0").exists, process)
    os.close(leader)
    (tmp_path / "go").touch()
    assert commands.finish(process).returncode == 143
    one = only_run(tmp_path)
    assert (one.result["state"], one.result["error"]) == ("preempted", None)
    assert "SIGHUP: saved after step" in (one.path / "log.txt").read_text()


def awaits_interrupt(pid: int) -> bool:
    """Whether a Ctrl-C has been sent to the process that it has not had yet, and will have."""
    try:
        masks = dict(line.split(":\t") for line in read(pid, "status").splitlines() if line.startswith(("Sig", "Shd")))
    except OSError:  # it has ended
        return False
    pending, blocked = (int(masks[name], 16) for name in ("ShdPnd", "SigBlk"))
    return bool(pending & ~blocked & 1 << signal.SIGINT - 1)


AT_TERMINAL = """\
import os, sys
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.setsid()
terminal = os.open(sys.argv[1], os.O_RDWR)
for stream in range(3):
    os.dup2(terminal, stream)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def test_a_reader_that_has_gone_takes_no_run_along(commands: Commands, tmp_path: Path) -> None:
    write_files(tmp_path, WAITING)
    process = commands.start("-m", "runner", *TINY, "model.at=step")
    wait_until((tmp_path / "ready-0").exists, process)
    assert process.stdout
    process.stdout.close()
    (tmp_path / "go").touch()
    assert process.wait(timeout=300) == 0
    assert only_run(tmp_path).result["state"] == "finished"


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["alone", "spawn", "agent", "torchrun"])
def test_a_second_ctrl_c_ends_what_does_not_come_to_an_end(
    way: str, begun: Callable, commands: Commands, tmp_path: Path
) -> None:
    (process,) = begun(way, "step", *LOADED)
    os.killpg(process.pid, signal.SIGINT)
    wait_until(told(tmp_path, 1 if way == "alone" else 2), process)
    wait_until(lambda: not any(awaits_interrupt(pid) for pid in commands.living(process)), process)
    time.sleep(0.5)  # a handler of Python's is called a moment later
    assert process.poll() is None, "the first one lets it finish its step"
    os.killpg(process.pid, signal.SIGINT)
    done = commands.finish(process)
    assert done.returncode == (1 if way == "torchrun" else 130), done.stdout + done.stderr
    assert way == "torchrun" or "Traceback" not in done.stderr
    wait_until(lambda: commands.living(process) == [])
    assert only_run(tmp_path).result["state"] in ("failed", "running")
