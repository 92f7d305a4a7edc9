"""The log of a run on the terminal and in its file."""

import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from rich.progress import Progress

from runner.records.console import LOGGER, logging_to
from runner.records.output import copying_output


def test_messages_are_printed_literally(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rich would replace :100: by an emoji and remove [bold]."""
    with logging_to(0, tmp_path):
        LOGGER.warning("model.py:100: [bold]")
    assert capsys.readouterr().out == "warning: model.py:100: [bold]\n"


def log_of(folder: Path) -> list[str]:
    return (folder / "log.txt").read_text().splitlines()


def test_log_has_what_code_prints_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = logging.StreamHandler(sys.stderr)  # a logger of another package keeps the stream
    with copying_output():
        print("built")
        with logging_to(0, tmp_path) as console:
            print("loading ...", end="")
            LOGGER.info("a message")
            print("one", 2, file=sys.stderr)
            other.emit(logging.makeLogRecord({"msg": "by another logger"}))
            console.print("by the [bold]console[/bold]", {"norm": 1.5})
            print("\x1b[31mred\x1b[0m\r\nnot\\x07printable: \x07")
            for done in range(5):
                print(f"\r{done}/4", end="", file=sys.stderr)  # as tqdm does
                LOGGER.info("step %d", done)
            print(file=sys.stderr)
            with redirect_stdout(StringIO()):
                print("elsewhere")
            print("the end", end="")
        print("after the log")
    expected = ["built", "loading ...", "a message", "one 2", "by another logger", "by the console", "{'norm': 1.5}"]
    expected += ["red", "not\\x07printable: \\x07", *(f"step {done}" for done in range(5)), "4/4", "the end"]
    assert log_of(tmp_path) == expected
    out, err = capsys.readouterr()
    assert out.startswith("built\nloading ...a message\nby the console") and out.endswith("the endafter the log\n")
    assert "\x1b[31mred\x1b[0m" in out
    assert err == "one 2\nby another logger\n" + "".join(f"\r{done}/4" for done in range(5)) + "\n"


def test_streams_are_unchanged_after_a_job(tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr
    methods = [
        vars(stream).get("write") for stream in before
    ]  # of a library that replaces them, such as wandb, or None
    with logging_to(0, tmp_path):
        assert (sys.stdout, sys.stderr) == before
        assert vars(sys.stdout)["write"] != methods[0]
    assert [vars(stream).get("write") for stream in before] == methods
    with logging_to(1, tmp_path):
        assert vars(sys.stdout).get("write") == methods[0]


def test_log_has_what_forked_processes_and_threads_print(tmp_path: Path) -> None:
    def work(name: str) -> None:
        for number in range(20):
            print(name, number)

    with logging_to(0, tmp_path):
        workers = [multiprocessing.get_context("fork").Process(target=work, args=(name,)) for name in "ab"]
        workers += [threading.Thread(target=work, args=(name,)) for name in "cd"]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
    assert sorted(log_of(tmp_path)) == sorted(f"{name} {number}" for name in "abcd" for number in range(20))


def test_prints_above_a_progress_bar_are_logged_but_not_the_bar(tmp_path: Path) -> None:
    with pseudo_terminal() as terminal, logging_to(0, tmp_path) as console:
        assert console.is_terminal
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("step", total=3)
            for step in range(3):
                bar.update(task, completed=step, refresh=True)
                print("printed", step)
                LOGGER.info("logged %d", step)
    assert log_of(tmp_path) == [f"{how} {step}" for step in range(3) for how in ("printed", "logged")]
    assert "printed 2" in terminal.getvalue() and "step" in terminal.getvalue()
    assert terminal.getvalue().count("printed 1") == 1


def test_a_closed_pipe_ends_no_job_that_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with logging_to(0, tmp_path):
            print("to nobody")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
    assert log_of(tmp_path) == ["to nobody"]


@contextmanager
def pseudo_terminal() -> Iterator[StringIO]:
    """Replace the standard output by a stream that claims to be a terminal."""

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "__stdout__", terminal)
        yield terminal
