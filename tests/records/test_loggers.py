"""The group `logger`: which loggers are called, resumed runs, errors of loggers, and invalid input."""

import csv
import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from custom_files import write_files
from hydra.core.global_hydra import GlobalHydra
from worlds import run

from runner.records.compared_runs import Trial
from runner.records.loggers import mlflow
from runner.records.loggers.contract import RunOutcome
from runner.records.loggers.dashboard import History, logged_metrics
from runner.records.loggers.mlflow import valid_name
from runner.records.loggers.wandb import WandB
from runner.records.run_files import METRICS, read_metrics

SMALL = ("model=toy", "data=toy", "batch_size=256", "backend=gloo")  # 4 steps an epoch
FILES = {
    "lines.py": """
        from runner.records.loggers.contract import Logger

        class Lines(Logger):
            def __init__(self, file: str = "lines", fails_at: int = 0):
                self.file, self.fails_at = file, fails_at

            def open(self, directory, first_step, trial):
                if self.fails_at < 0:
                    raise ConnectionError("no response")
                self.write(f"open {first_step}")

            def scalars(self, step, metrics):
                if step == self.fails_at:
                    raise ConnectionError("the server has closed the connection")
                self.write(f"{step} {' '.join(sorted(metrics))}")

            def text(self, tag, text):
                self.write(tag)

            def flush(self):
                self.write("flush")

            def close(self, outcome):
                self.write(f"close {bool(outcome)} {outcome.state}")

            def write(self, line):
                with open(self.file, "a") as file:
                    file.write(line + "\\n")
    """,
    "dies.py": """
        import os, signal
        from runner import Callback

        class Dies(Callback):
            def after_step(self, now):
                if now.step == 6 and not os.path.exists("died"):
                    open("died", "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
    """,
    "logger/lines.yaml": "# lines of a file\nlines: {_target_: lines.Lines, file: lines, fails_at: 0}\n",
    "logger/nameless.yaml": "# without a name\n_target_: lines.Lines\nfile: lines\n",
    "logger/lacking.yaml": "lacking: {_target_: dies.Dies}\n",
    "callbacks/dies.yaml": "dies: {_target_: dies.Dies}\n",
}
ALL_STEPS = [str(step) for step in range(1, 9)]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a custom logger and a custom callback in mine/."""
    write_files(tmp_path / "mine", FILES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("lines", "dies"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.chdir(tmp_path)
    GlobalHydra.instance().clear()
    return tmp_path


def read_table(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.fault("kill -9, in metrics.csv", outcome="survived")
def test_the_csv_table_is_exact_after_a_kill(mine: Path) -> None:
    words = (*SMALL, "epochs=2", "logger=csv", "checkpoint.every_steps=3", "eval_every_steps=3")
    words = (*words, "checkpoint.asynchronous=false")  # so that step_3 is complete before the kill
    with pytest.raises(Exception, match="rank 0"):
        run(mine / "outputs", 1, f"--config-dir={mine / 'mine'}", *words, "callbacks=dies")
    (path,) = (mine / "outputs" / "run").iterdir()
    killed = read_table(path)
    assert [row["step"] for row in killed] == ["1", "2", "3", "3", "4", "4", "5", "6"]
    with (path / "metrics.csv").open("a") as file:
        file.write("7,0.")  # half a row
    run(mine / "outputs", 1, f"resume='{path}'")
    rows = read_table(path)
    assert rows[:6] == killed[:6] and [row["step"] for row in rows if row["train/loss"]] == ALL_STEPS
    lines = [dict(line) for line in read_metrics(path)]
    assert [{key: float(value) for key, value in row.items() if value} for row in rows] == [
        {key: value for key, value in line.items() if key != "epoch"} for line in lines
    ]


@pytest.mark.parametrize("word", ["logger=[csv,lines]", "~logger"])
def test_chosen_loggers_are_called(word: str, mine: Path, here: Callable[..., int]) -> None:
    assert here("--config-dir", "mine", *SMALL, "max_steps=2", word) == 0
    expected = ["open 0", "configuration", "1 ", "2 ", "2 val/loss", "flush", "close True finished"]
    if "lines" in word:
        lines = (mine / "lines").read_text().splitlines()
        assert [line[:2] if "train/loss" in line else line for line in lines] == expected
    else:
        assert not (mine / "lines").exists()
    (path,) = (mine / "outputs" / "run").iterdir()
    assert (path / "metrics.csv").exists() == ("csv" in word)
    assert not list(path.glob("events.*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["logger=[csv,linse]"], "logger=[csv,linse]: no such logger; did you mean lines?"),
        (
            ["logger=[csv,nameless]"],
            "logger._target_=lines.Lines: a logger has a name; in its file write NAME: {_target_: lines.Lines}",
        ),
        (
            ["logger=lacking"],
            "logger.lacking._target_=dies.Dies: the class lacks wants_predictions, open, scalars, predictions, text, "
            "flush, close, which runner.records.loggers.contract.Logger declares",
        ),
        (["logger=mlflow"], "logger=mlflow needs mlflow; pip install 'experiment-runner[mlflow]'"),
        (["logger=wandb"], "logger=wandb needs wandb; pip install 'experiment-runner[wandb]'"),
        (["logger=mlflow", "logger.mlflow.uri=here"], "logger.mlflow.uri=here must be a URI; try uri=sqlite:///here"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_invalid_input_is_reported_in_one_line(
    words: list[str],
    message: str,
    mine: Path,
    here: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("runner.errors.find_spec", lambda name: None)
    assert here("--config-dir", "mine", *SMALL, "max_steps=2", *words) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(message) and err.count("\n") == 1
    assert [path.name for path in mine.iterdir()] == ["mine"]


def test_an_error_disables_only_the_logger_that_raised_it(
    mine: Path, here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--config-dir", "mine", *SMALL, "logger=[lines,csv]")
    assert here(*words, "max_steps=5", "logger.lines.fails_at=2") == 0
    output = "".join(capfd.readouterr())
    warning = "logger=lines is disabled after an error: ConnectionError: the server has closed the connection; the run"
    assert output.count(warning) == 1 and "Traceback" not in output
    (path,) = (mine / "outputs" / "run").iterdir()
    assert [row["step"] for row in read_table(path)] == ["1", "2", "3", "4", "4", "5", "5"]
    assert "3 " not in (mine / "lines").read_text()

    assert here(*words, "logger.lines.fails_at=-1", "name=new") == 1
    output = "".join(capfd.readouterr())
    message = "logger=lines cannot be opened: no response; fix the problem, or choose another logger"
    assert message in output and "Traceback" not in output
    # A run that has steps to lose does not fail.
    assert here("--config-dir", "mine", f"resume={path}", "max_steps=6", "logger.lines.fails_at=-1") == 0
    assert "logger=lines is disabled after an error: ConnectionError: no response" in capfd.readouterr().out


def test_history_selects_the_metrics_that_a_dashboard_does_not_have(tmp_path: Path) -> None:
    lines = [{"step": step, "epoch": 1, "train/loss": step / 2} for step in (1, 2, 3)]
    lines.insert(2, {"step": 2, "epoch": 1, "val@2": 0.5})
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = History({"train/loss": 1}, valid_name)
    assert list(history.missing(str(tmp_path))) == [
        (2, {"train/loss": 1.0}),
        (2, {"val_2": 0.5}),
        (3, {"train/loss": 1.5}),
    ]
    assert history.new(1, {"train/loss": 0.5, "other": 1.0}) == {"other": 1.0}
    shutil.rmtree(tmp_path)
    assert list(logged_metrics(str(tmp_path))) == []


@pytest.mark.parametrize(
    ("mode", "is_known", "starting_step", "expected"),
    [
        ("offline", False, 0, [1, 2, 3]),  # wandb was chosen only when the run was resumed
        ("offline", True, 0, [3]),
        ("online", True, 2, [2, 3]),  # the server has step 1
    ],
)
def test_wandb_logs_the_steps_that_it_does_not_have(
    mode: Any, is_known: bool, starting_step: int, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / METRICS).write_text("".join(f'{{"step": {step}, "epoch": 1, "loss": 1.0}}\n' for step in (1, 2)))
    (tmp_path / "config.yaml").write_text("name: run\n")
    if is_known:
        (tmp_path / "loggers.json").write_text('{"wandb": {"run": "abc"}}')
    wandb = MagicMock(Error=RuntimeError)
    wandb.init.return_value.starting_step = starting_step
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("runner.errors.find_spec", lambda name: name)
    logger = WandB(mode=mode)
    logger.open(str(tmp_path), 2, Trial({}, {}))
    logger.scalars(3, {"loss": 1.0})
    logger.close(RunOutcome("failed"))
    assert [call.kwargs["step"] for call in wandb.init.return_value.log.call_args_list] == expected
    wandb.init.return_value.finish.assert_called_once_with(exit_code=1)
    run_id = json.loads((tmp_path / "loggers.json").read_text())["wandb"]["run"]
    assert wandb.init.call_args.kwargs["id"] == run_id and (run_id == "abc") == is_known


def test_names_are_converted_to_those_that_mlflow_accepts() -> None:
    converted = {"val/f1 x/v1.0-x:y": "val/f1 x/v1.0-x:y", "a@b/c[0]": "a_b/c_0_", "/a": "_/a", "../a": "__/a"}
    assert {name: valid_name(name) for name in [*converted, "x" * 300]} == {**converted, "x" * 300: "x" * 250}


@pytest.mark.thorough
def test_a_server_that_accepts_connections_and_hangs_fails_a_new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow, "RESPONSE_S", 1)
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # the kernel accepts connections for it
        server = f"127.0.0.1:{hanging.getsockname()[1]}"
        message = f"logger=mlflow cannot be opened: API request to http://{server}/.* failed with .*(timeout|timed out)"
        with pytest.raises(Exception, match=message):
            run(tmp_path, 1, *SMALL, "logger=mlflow", f"logger.mlflow.uri=http://user:secret@{server}")
