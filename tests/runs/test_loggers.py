"""The group `logger`: which are told what, over resumes, when one of them fails, and what is refused."""

import csv
import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from own_folders import write_files
from worlds import run

from runner.config.renamed_targets import rename_keys, rename_shared
from runner.runs.loggers import dashboard, mlflow
from runner.runs.loggers.background import Background
from runner.runs.loggers.history import History, logged
from runner.runs.loggers.mlflow import _check_answers, valid_name

SMALL = ("model=toy", "data=toy", "batch_size=256", "backend=gloo")  # 4 steps an epoch
FILES = {
    "lines.py": """
        class Lines:
            wants_predictions = False

            def __init__(self, file: str = "lines", fails_at: int = 0):
                if not file:
                    raise ValueError("file= must be a name")
                self.file, self.fails_at = file, fails_at

            def open(self, directory, first_step, trial):
                if self.fails_at < 0:
                    raise ConnectionError("nobody there")
                self.write(f"open {first_step}")

            def scalars(self, step, metrics):
                if step == self.fails_at:
                    raise ConnectionError("the server is gone")
                self.write(f"{step} {' '.join(sorted(metrics))}")

            def predictions(self, step, seen): ...

            def text(self, tag, text):
                self.write(tag)

            def flush(self): ...

            def close(self, finished):
                self.write(f"close {bool(finished)} {finished.state}")

            def write(self, line):
                with open(self.file, "a") as file:
                    file.write(line + "\\n")
    """,
    "dies.py": """
        import os, signal
        from runner.training.callback import Callback

        class Dies(Callback):
            def after_step(self, now):
                if now.step == 6 and not os.path.exists("died"):
                    open("died", "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
    """,
    "logger/lines.yaml": "# lines of a file\nlines: {_target_: lines.Lines, file: lines, fails_at: 0}\n",
    "logger/nameless.yaml": "# as one was written when there was one logger\n_target_: lines.Lines\nfile: lines\n",
    "logger/lacking.yaml": "lacking: {_target_: dies.Dies}\n",
    "callbacks/dies.yaml": "dies: {_target_: dies.Dies}\n",
}
ALL_STEPS = [str(step) for step in range(1, 9)]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a logger and a callback of their own."""
    write_files(tmp_path / "mine", FILES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("lines", "dies"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.chdir(tmp_path)
    GlobalHydra.instance().clear()
    return tmp_path


def table(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.fault("kill -9, in metrics.csv", outcome="survived")
def test_a_table_is_exact_over_a_kill(mine: Path) -> None:
    words = (*SMALL, "epochs=2", "logger=csv", "checkpoint.every_steps=3", "eval_every_steps=3")
    words = (*words, "checkpoint.asynchronous=false")  # the kill comes after the fourth step's
    with pytest.raises(Exception, match="rank 0"):
        run(mine / "outputs", 1, f"--config-dir={mine / 'mine'}", *words, "callbacks=dies")
    (path,) = (mine / "outputs" / "run").iterdir()
    killed = table(path)
    assert [row["step"] for row in killed] == ["1", "2", "3", "3", "4", "4", "5", "6"]
    with (path / "metrics.csv").open("a") as file:
        file.write("7,0.")  # half a row
    run(mine / "outputs", 1, f"resume='{path}'")
    rows = table(path)
    assert rows[:6] == killed[:6] and [row["step"] for row in rows if row["train/loss"]] == ALL_STEPS
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [{key: float(value) for key, value in row.items() if value} for row in rows] == [
        {key: value for key, value in line.items() if key != "epoch"} for line in lines
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["logger=lines"], True),
        (["logger=[csv,lines]"], True),
        (["logger=nameless"], True),
        (["logger=nameless", "logger.file=lines"], True),
        (["logger=[none,csv]"], False),
        (["logger=[]"], False),
        (["~logger"], False),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_those_that_are_chosen_are_told(words: list[str], told: bool, mine: Path, here: Callable[..., int]) -> None:
    assert here("--config-dir", "mine", *SMALL, "max_steps=2", *words) == 0
    expected = ["open 0", "configuration", "1 ", "2 ", "2 val/loss", "close True finished"]
    if told:
        lines = (mine / "lines").read_text().splitlines()
        assert [line[:2] if "train/loss" in line else line for line in lines] == expected
    else:
        assert not (mine / "lines").exists()
    (path,) = (mine / "outputs" / "run").iterdir()
    assert (path / "metrics.csv").exists() == ("csv" in words[0])
    assert not list(path.glob("events.*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["logger=[csv,linse]"], "logger=[csv,linse]: no such logger; did you mean lines?"),
        (["logger.images=false"], "logger.images=false: no such key; did you mean logger.tensorboard.images?"),
        (
            ["logger=[csv,nameless]"],
            "logger._target_=lines.Lines: a logger has a name; in its file write NAME: {_target_: lines.Lines}",
        ),
        (["logger=lines", "logger.lines.file=''"], "logger.lines.file= must be a name"),
        (["logger=nameless", "logger.file=''"], "logger.file= must be a name"),
        (
            ["logger=lacking"],
            "logger.lacking._target_=dies.Dies: the class lacks wants_predictions, open, scalars, predictions, text, "
            "flush, close, which runner.runs.loggers.protocol.Logger declares",
        ),
        (["logger=mlflow"], "logger=mlflow needs mlflow; pip install 'experiment-runner[mlflow]'"),
        (["logger=mlflow", "logger.mlflow.uri=here"], "logger.mlflow.uri=here must be a URI; try uri=sqlite:///here"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_what_is_wrong_is_told_in_one_line(
    words: list[str],
    message: str,
    mine: Path,
    here: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dashboard, "find_spec", lambda name: None)
    assert here("--config-dir", "mine", *SMALL, "max_steps=2", *words) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(message) and err.count("\n") == 1
    assert [path.name for path in mine.iterdir()] == ["mine"]


def test_one_that_fails_loses_its_own_numbers_and_no_more(
    mine: Path, here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--config-dir", "mine", *SMALL, "logger=[lines,csv]")
    assert here(*words, "max_steps=5", "logger.lines.fails_at=2") == 0
    said = capfd.readouterr()
    warning = "logger lines is told nothing more: ConnectionError: the server is gone; the run goes on"
    assert (said.out + said.err).count(warning) == 1 and "Traceback" not in said.out + said.err
    (path,) = (mine / "outputs" / "run").iterdir()
    assert [row["step"] for row in table(path)] == ["1", "2", "3", "4", "4", "5", "5"]
    assert "3 " not in (mine / "lines").read_text()

    assert here(*words, "logger.lines.fails_at=-1", "name=new") == 1
    said = capfd.readouterr()
    told = "logger=lines cannot be opened: nobody there; mend that, or choose another logger"
    assert told in said.out + said.err and "Traceback" not in said.out + said.err
    # Of a run that has steps to lose it is no reason to fail.
    assert here("--config-dir", "mine", f"resume={path}", "max_steps=6", "logger.lines.fails_at=-1") == 0
    assert "logger lines is told nothing more: ConnectionError: nobody there" in capfd.readouterr().out


def test_what_was_recorded_when_a_logger_had_no_name_goes_on(tmp_path: Path) -> None:
    first = run(tmp_path, 1, *SMALL, "max_steps=2", "logger=tensorboard")
    overrides = first.path / "overrides.yaml"
    overrides.write_text(yaml.safe_dump([*yaml.safe_load(overrides.read_text()), "logger.images=false"]))
    run(tmp_path, 1, f"resume='{first.path}'", "max_steps=3")
    assert yaml.safe_load((first.path / "config.yaml").read_text())["logger"]["tensorboard"]["images"] is False

    assert rename_keys(["logger=tensorboard", "logger.images=true"])[1] == "logger.tensorboard.images=true"
    older = {"logger._target_": "runner.loggers.tensorboard.TensorBoard", "logger.images": True, "seed": 0}
    now = {"logger.tensorboard._target_": "runner.runs.loggers.tensorboard.TensorBoard"}
    assert rename_shared(older) == {**now, "logger.tensorboard.images": True, "seed": 0}
    assert rename_shared({"logger._target_": "runner.runs.loggers.none.NoLogger", "seed": 0}) == {
        "logger": {},
        "seed": 0,
    }
    assert rename_shared({"logger._target_": "lines.Lines"}) == {"logger._target_": "lines.Lines"}


def test_a_dashboard_lacks_what_it_has_not_been_told(tmp_path: Path) -> None:
    lines = [{"step": step, "epoch": 1, "train/loss": step / 2} for step in (1, 2, 3)]
    lines.insert(2, {"step": 2, "epoch": 1, "val@2": 0.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = History({"train/loss": 1}, valid_name)
    assert list(history.missing(str(tmp_path))) == [
        (2, {"train/loss": 1.0}),
        (2, {"val_2": 0.5}),
        (3, {"train/loss": 1.5}),
    ]
    assert history.new(1, {"train/loss": 0.5, "other": 1.0}) == {"other": 1.0}
    shutil.rmtree(tmp_path)
    assert list(logged(str(tmp_path))) == []


def test_names_are_those_that_mlflow_takes() -> None:
    for name in ("val/f1/class_0", "train/loss", "perf/a b", "v1.0-x:y"):
        assert valid_name(name) == name
    taken = {
        "a@b/c[0]": "a_b/c_0_",
        "/a": "_/a",
        "a//b": "a/_/b",
        "../a": "__/a",
        "a/./b": "a/_/b",
        "x" * 300: "x" * 250,
    }
    assert {name: valid_name(name) for name in taken} == taken


def test_calls_in_the_background_are_made_in_order_and_their_error_is_raised_later() -> None:
    made: list[int] = []
    background = Background("test")
    for number in range(5):
        background.submit(lambda number=number: made.append(number))
    assert background.wait(60) and made == [0, 1, 2, 3, 4]

    def fail() -> None:
        raise ConnectionError("gone")

    background.submit(fail)
    with pytest.raises(ConnectionError, match="gone"):
        background.wait(60)
    with pytest.raises(ConnectionError, match="gone"):
        background.submit(fail)


def test_a_server_that_takes_connections_and_hangs_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow, "ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # the system takes connections for it
        uri = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"^{uri} does not answer"):
            _check_answers(uri)
