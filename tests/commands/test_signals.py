"""Signals at any moment, to any process of a command: the run is saved, and no process remains."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from commands import TORCHRUN, Commands, by_age, free_port, parent_of, wait_until
from custom_files import write_files
from worlds import Run, only_run, run

# A custom model that waits at one place until a file exists.
WAITING = {
    "mine/mine.py": """\
        import os
        import signal
        import time

        from runner.shipped.models.mlp import MLP

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
                if self.at == place and (self.calls >= 5 if self.training else len(samples) > 3):
                    if place == "step" and self.calls == 5:
                        self.note_signals()
                    self.wait()
                return super().forward(samples)

            def note_signals(self):
                for number in map(signal.Signals.__getitem__, ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP", "SIGQUIT")):
                    if callable(handler := signal.getsignal(number)):
                        signal.signal(number, lambda *args, handler=handler: (handler(*args), self.note()))

            def note(self):
                open(f"received-{RANK}", "w").close()

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
    # The import of torch, or of the fork server's modules, waits for the same file.
    "site/sitecustomize.py": """\
        import os
        import sys
        import time


        class Waiting:
            def find_spec(name, path=None, target=None):
                if name == os.environ["WAITS"] and "runner" in sys.modules:
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
    """Reset signals that the tests' process may ignore, under nohup, and that its children would ignore as well."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGQUIT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def start_at(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., "list[subprocess.Popen[str]]"]:
    """Start a command that waits at the place. Return its process, or those of ranks that were started by hand."""

    monkeypatch.chdir(tmp_path)  # for ranks that the test forks

    def begin(way: str, place: str, *args: str) -> "list[subprocess.Popen[str]]":
        write_files(tmp_path, WAITING)
        waits = {"import": "torch", "server": "runner.launchers.preload"}.get(place)
        env = {**commands.with_path(tmp_path / "site"), "WAITS": waits} if waits else {}
        args = (*(TINY if way == "alone" else SPREAD), *WAYS[way], f"model.at={place}", *args)
        start = commands.fork
        if way == "torchrun" or waits:
            start, args = commands.start, ("-m", "runner", *args)
        if way == "torchrun":
            args = (*TORCHRUN, "--nproc-per-node=2", f"--master-port={free_port()}", *args)
        worlds = [{}]
        if way == "hand":
            shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            worlds = [{**shared, "RANK": str(rank)} for rank in range(2)]
        processes = [start(*args, env={**env, **world}) for world in worlds]
        ranks = 1 if way == "alone" or (waits and way in ("spawn", "agent")) else 2
        wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(ranks)), processes[0])
        return processes

    return begin


def ranks_of(commands: Commands, process: "subprocess.Popen[str]") -> list[int]:
    """Return the ranks' processes by rank: children of the fork server or of torchrun, without loader workers."""
    living = commands.living(process)
    environ = {pid: dict(line.partition("=")[::2] for line in read(pid, "environ").split("\0")) for pid in living}
    parents = {pid: parent_of(pid) for pid in living}
    servers = [pid for pid in living if "forkserver" in read(pid, "cmdline")]
    if servers:  # in the order in which they were forked
        return sorted((pid for pid in living if parents[pid] in servers), key=by_age)
    return sorted((pid for pid in living if parents[pid] == process.pid), key=lambda pid: environ[pid]["RANK"])


def num_started(commands: Commands, process: "subprocess.Popen[str]") -> int:
    """Return the number of processes that torchrun has started as ranks."""
    number = 0
    for pid in commands.living(process):
        with contextlib.suppress(OSError):  # it has exited
            number += "\0RANK=" in read(pid, "environ")
    return number


def read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(errors="replace")


def send(number: signal.Signals, receiver: str, commands: Commands, processes: "list[subprocess.Popen[str]]") -> None:
    """Send the signal to the started process, its process group, or one rank."""
    first = processes[0]
    if receiver == "group":
        os.killpg(first.pid, number)
    elif receiver == "rank" and len(processes) == 1:
        os.kill(ranks_of(commands, first)[1], number)
    else:
        processes[-1 if receiver == "rank" else 0].send_signal(number)


def have_received(folder: Path, ranks: int) -> Callable[[], bool]:
    """Return a function that is True once each of the ranks, which wait in a step, has received a signal."""
    return lambda: all((folder / f"received-{rank}").exists() for rank in range(ranks))


thorough, soak = pytest.mark.thorough, pytest.mark.soak
SAVED = [
    pytest.param("spawn", "INT", "group", "", marks=pytest.mark.fault("Ctrl-C", outcome="survived")),
    pytest.param("torchrun", "USR1", "rank", "loaded", marks=thorough),
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
def test_a_stopped_run_is_saved_and_resumes_to_the_same_weights(
    way: str, number: str, receiver: str, loaded: str, start_at: Callable, commands: Commands, tmp_path: Path
) -> None:
    ranks = 1 if way == "alone" else 2
    processes = start_at(way, "step", *(LOADED if loaded else ()))
    send(signal.Signals[f"SIG{number}"], receiver, commands, processes)
    asked_agent = way == "torchrun" and receiver != "rank"
    if receiver == "parent" and not (asked_agent and number == "USR1"):  # which the agent forwards
        wait_until(have_received(tmp_path, ranks), processes[0])
    (tmp_path / "go").touch()
    (done,) = [commands.finish(process) for process in processes]
    output, one = done.stdout + done.stderr, only_run(tmp_path)
    if way != "torchrun":  # torchrun has an exit status of its own
        assert done.returncode == 143, output
        assert done.stderr == ""
    if asked_agent and number == "USR1":  # torchrun does not handle it, and dies
        noticed = "the process that started this rank has exited|a signal to another rank"  # depending on the rank
        is_over = one.result["state"] == "finished"  # before a rank has checked its parent
        assert is_over or re.search(f"({noticed}): saved after step", output), output
        if is_over:
            wait_until(lambda: commands.living(processes[0]) == [])
            return
    else:
        assert "saved after step" in output or number == "HUP", output
    wait_until(lambda: commands.living(processes[0]) == [])
    assert one.result["state"] == "preempted" and one.result["step"] >= 5, output
    assert one.result["error"] is None
    assert "no response from" not in output and "error:" not in output and "Traceback" not in done.stdout
    spread = () if way == "alone" else ("parallel=ddp",)
    whole = run(tmp_path / "whole", ranks, "model=mlp", *SMALL, *spread, "backend=gloo")
    again = run(tmp_path / "outputs", ranks, f"resume={one.path}", "launcher=env", "backend=gloo")
    assert again.result["weights_sha256"] == whole.result["weights_sha256"]


EARLY = [
    ("alone", "import", "TERM", "parent"),
    pytest.param("spawn", "build", "TERM", "group", marks=thorough),
    pytest.param("spawn", "server", "TERM", "parent", marks=thorough),
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


@pytest.mark.fault("a signal before the run starts", outcome="refused")
@pytest.mark.parametrize(("way", "place", "number", "receiver"), EARLY)
def test_a_command_stopped_before_its_run_exits_at_once_and_writes_nothing(
    way: str, place: str, number: str, receiver: str, start_at: Callable, commands: Commands, tmp_path: Path
) -> None:
    processes = start_at(way, place)
    if place == "server":
        time.sleep(0.5)  # until the command starts the first rank, which waits for the fork server
    send(signal.Signals[f"SIG{number}"], receiver, commands, processes)
    others = receiver == "rank" or len(processes) > 1 or (way == "torchrun" and number == "USR1")  # torchrun dies of it
    if others or place == "server":  # they have not received it, and continue to the rendezvous
        (tmp_path / "go").touch()
    for process in processes:
        done = commands.finish(process)
        if way != "torchrun":
            assert (done.returncode, done.stdout, done.stderr) == (143, "", "")
    wait_until(lambda: not any(commands.living(process) for process in processes))
    assert not (tmp_path / "outputs").exists()


@pytest.mark.fault("a signal at a random moment of the start", outcome="refused")
@pytest.mark.parametrize(
    ("way", "times"),
    [
        *(pytest.param(way, 2, marks=thorough) for way in ("spawn", "torchrun")),
        *(pytest.param(way, 50, marks=soak) for way in ("spawn", "torchrun")),
    ],
)
def test_a_signal_at_any_moment_of_the_start_ends_all_processes(
    way: str,
    times: int,
    commands: Commands,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Ranks exit by themselves: torchrun would kill them after 30 s, and `finish` the command after 300 s."""
    random, slowest_s = Random(times), 0.0
    args = ("-m", "runner", *SMALL[:2], "model=mlp", "epochs=100000", "parallel=ddp", *WAYS[way])
    for _ in range(times):
        ranks = (*TORCHRUN, "--nproc-per-node=2", f"--master-port={free_port()}") if way == "torchrun" else ()
        process = commands.start(*ranks, *args)
        if way == "torchrun":  # whose own start is not tested
            wait_until(lambda process=process: num_started(commands, process) == 2, process)
        time.sleep(random.uniform(0, 8))
        number, receiver = random.choice([signal.SIGTERM, signal.SIGINT]), random.choice(["parent", "group", "rank"])
        if receiver == "rank" and way == "torchrun":
            number = signal.SIGTERM
            send(number, receiver, commands, [process])
        else:
            send(number, "parent" if receiver == "rank" else receiver, commands, [process])
        sent_at = time.monotonic()
        done = commands.finish(process)
        wait_until(lambda process=process: commands.living(process) == [])
        slowest_s = max(slowest_s, time.monotonic() - sent_at)
        output = f"{number.name} to {receiver}, status {done.returncode}\n{done.stdout}{done.stderr}"
        assert "SIGKILL" not in output, output
        if "KeyboardInterrupt" in done.stderr:  # Python, or torchrun, had not reached the first line of the runner
            continue
        assert "/runner/" not in done.stderr, output  # no traceback
        if way == "spawn":
            assert done.returncode in (143, -number), output
            assert done.stderr == "", output
    record_property("injected", times)
    record_property("slowest_s", round(slowest_s, 1))


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["spawn", pytest.param("alone", marks=soak)])
def test_a_stopped_evaluation_saves_nothing(way: str, start_at: Callable, commands: Commands, tmp_path: Path) -> None:
    """In a world of two, one rank receives the signal, and the other one loses it during a collective."""
    write_files(tmp_path, WAITING)
    trained = run(tmp_path / "outputs", 1, f"--config-dir={tmp_path / 'mine'}", *TINY[1:], "backend=gloo")
    (process,) = start_at(way, "evaluation", "task=evaluate", f"run={trained.path}", "backend=gloo")
    send(signal.SIGTERM, "rank" if way == "spawn" else "parent", commands, [process])
    (tmp_path / "go").touch()
    done = commands.finish(process)
    assert (done.returncode, done.stderr) == (143, ""), done.stdout
    (path,) = (path for path in (tmp_path / "outputs" / "run").iterdir() if path != trained.path)
    assert Run(path).result["state"] == "preempted"
    assert f"SIGTERM: stopped; its directory is {path}" in done.stdout


@pytest.mark.thorough
@pytest.mark.fault("a closed terminal", outcome="refused")
def test_a_run_is_saved_when_its_terminal_closes(commands: Commands, tmp_path: Path) -> None:
    write_files(tmp_path, WAITING)
    leader, follower = pty.openpty()
    args = ("-m", "runner", *TINY, "model.at=step")
    # After setsid the terminal is the controlling one, whose end sends a SIGHUP.
    process = commands.start("-c", AT_TERMINAL, os.ttyname(follower), *args)
    os.close(follower)
    wait_until((tmp_path / "ready-0").exists, process)
    os.close(leader)
    (tmp_path / "go").touch()
    assert commands.finish(process).returncode == 143
    one = only_run(tmp_path)
    assert (one.result["state"], one.result["error"]) == ("preempted", None)
    assert "SIGHUP: saved after step" in (one.path / "log.txt").read_text()


def awaits_interrupt(pid: int) -> bool:
    """Return True if a SIGINT to the process is pending and not blocked."""
    try:
        masks = dict(line.split(":\t") for line in read(pid, "status").splitlines() if line.startswith(("Sig", "Shd")))
    except OSError:  # the process has exited
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


@pytest.mark.thorough
def test_a_run_continues_when_its_output_is_closed(commands: Commands, tmp_path: Path) -> None:
    write_files(tmp_path, WAITING)
    process = commands.start("-m", "runner", *TINY, "model.at=step")
    wait_until((tmp_path / "ready-0").exists, process)
    assert process.stdout
    process.stdout.close()
    (tmp_path / "go").touch()
    assert process.wait(timeout=300) == 0
    assert only_run(tmp_path).result["state"] == "finished"


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["alone", "agent", *(pytest.param(way, marks=soak) for way in ("spawn", "torchrun"))])
def test_a_second_ctrl_c_ends_a_command_that_does_not_exit(
    way: str, start_at: Callable, commands: Commands, tmp_path: Path
) -> None:
    (process,) = start_at(way, "step", *LOADED)
    os.killpg(process.pid, signal.SIGINT)
    wait_until(have_received(tmp_path, 1 if way == "alone" else 2), process)
    wait_until(lambda: not any(awaits_interrupt(pid) for pid in commands.living(process)), process)
    time.sleep(0.5)  # Python calls its handler a moment later
    assert process.poll() is None, "the first Ctrl-C lets the step finish"
    os.killpg(process.pid, signal.SIGINT)
    done = commands.finish(process)
    assert done.returncode == (1 if way == "torchrun" else 130), done.stdout + done.stderr
    assert way == "torchrun" or "Traceback" not in done.stderr
    wait_until(lambda: commands.living(process) == [])
    assert only_run(tmp_path).result["state"] in ("failed", "running")
