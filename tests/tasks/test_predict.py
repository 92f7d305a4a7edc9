"""task=predict: the same file from any number of ranks and any mode, each sample once, in the order of the data."""

import csv
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Commands
from worlds import Run, run

from runner.errors import InputError, JobFailed
from runner.jobs.trained_model import load_trained
from runner.tasks import prediction_files
from runner.tasks.prediction_files import columns_of

TESTS = Path(__file__).parents[1]
CONVNET = ("model=convnet", "model.channels=[4,8]", "data.sample_shape=[1,8,8]", "batch_size=350", "precision=fp64")
HEADS = (f"--config-dir={TESTS}/parallel/own", "data=figures", "model=two_heads", "loss=both_heads", "batch_size=20")

FACTORY = """
from runner import Objective

class WithoutPredict(Objective):
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])

def make():
    return WithoutPredict()
"""

BOXES = """
import torch
from runner import Objective

class Boxes(Objective):
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])

    def predict(self, model, batch):
        counts = [1 + int(abs(target) * 10) % 4 for target in batch[1][:, 0].tolist()]
        outputs = [{"boxes": row.expand(count, -1), "label": row.sum() / 0} for row, count in
                   zip(model(batch[0]).square(), counts)]
        return outputs, batch[1]
"""

PAIRS = """
from runner import Objective

class Pairs(Objective):
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])

    def predict(self, model, batch):
        outputs = model(batch[0])
        return [outputs, 2 * outputs], [batch[1], 2 * batch[1]]
"""


def train(folder: Path, *args: str, ranks: int = 1) -> Run:
    return run(folder, ranks, *args, "logger=none", "max_steps=3", "optimizer.lr=0.01")


def predicted(done: Run, folder: Path, ranks: int, *args: str) -> Run:
    return run(folder, ranks, f"run={done.path}", "task=predict", f"outputs={folder}", *args)


def sha256(run: Run, kind: str) -> str:
    name = {"csv": "predictions.csv", "parquet": "predictions.parquet", "npy": "predictions/output.npy"}[kind]
    return hashlib.sha256((run.path / name).read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def convnet(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("convnet"), *CONVNET)


@pytest.fixture(scope="module")
def alone(convnet: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the hash of each format's file, written by one process."""
    return {
        kind: sha256(predicted(convnet, tmp_path_factory.mktemp(kind), 1, f"predict.format={kind}"), kind)
        for kind in ("csv", "parquet", "npy")
    }


@pytest.mark.parametrize(
    ("mode", "ranks", "kind"),
    [
        pytest.param("ddp", 3, "csv", marks=pytest.mark.thorough),
        ("fsdp", 2, "npy"),
        pytest.param("pipeline", 4, "parquet", marks=pytest.mark.thorough),
    ],
)
def test_any_number_of_ranks_writes_the_same_file(
    mode: str, ranks: int, kind: str, convnet: Run, alone: dict[str, str], tmp_path: Path
) -> None:
    args = (f"parallel={mode}", f"predict.format={kind}", *["parallel.stages=2"] * (mode == "pipeline"))
    there = predicted(convnet, tmp_path, ranks, *args)
    assert sha256(there, kind) == alone[kind]
    assert not [path for path in there.path.iterdir() if path.name.startswith(".")]


@pytest.mark.cpu("compares numbers of threads")
@pytest.mark.thorough
def test_the_file_does_not_depend_on_the_number_of_threads(commands: Commands, tmp_path: Path) -> None:
    """The last bits of a long sum depend on the number of threads that compute it."""
    done = train(tmp_path, "model=convnet", "precision=fp64", "batch_size=100")
    args = ("task=predict", f"run={done.path}")
    wide = (f"outputs={tmp_path}", "threads=null")  # the run was trained with one thread
    spawned = ("launcher=spawn", "launcher.nproc_per_node=3", "parallel=ddp")
    hashes = []
    for name, threads, more in (("alone", "2", ()), ("spawned", "1", spawned)):
        printed = commands.runner(*args, *wide, f"name={name}", *more, env={"OMP_NUM_THREADS": threads})
        assert printed.returncode == 0, printed.stderr
        (there,) = (tmp_path / name).iterdir()
        hashes.append(sha256(Run(there), "csv"))
    assert len({*hashes}) == 1


def test_predictions_are_the_outputs_of_the_model(convnet: Run, tmp_path: Path) -> None:
    """In the order of the data, and bit-identical to calling the trained model."""
    there = predicted(convnet, tmp_path, 2, "parallel=ddp", "split=train", "predict.batch_size=100")
    with (there.path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [*rows[0]] == ["index", "target", "prediction", "probability", *(f"output_{n}" for n in range(10))]
    assert [int(row["index"]) for row in rows] == list(range(1437))
    from runner.shipped.data.digits import Digits

    data = Digits(True, [1, 8, 8], 10)
    with torch.no_grad():
        outputs = load_trained(convnet.path)(torch.stack([sample for sample, _ in data]).double())
    written = torch.tensor([[float(row[f"output_{n}"]) for n in range(10)] for row in rows], dtype=torch.float64)
    assert (written - outputs).abs().max() < 1e-12
    assert [int(row["prediction"]) for row in rows] == outputs.argmax(1).tolist()
    assert [int(row["target"]) for row in rows] == [int(target) for _, target in data]
    assert float(rows[7]["probability"]) == pytest.approx(outputs.softmax(1).max(1).values[7].item(), rel=1e-12)
    assert there.result["state"] == "finished" and there.result["step"] == 3


def test_samples_of_a_part_of_the_data_are_named_by_their_indices_in_the_data(tmp_path: Path) -> None:
    """Also in the records of task=trace. The target of each sample is its index."""
    np.save(tmp_path / "x.npy", np.zeros((40, 2), np.float32))
    np.save(tmp_path / "y.npy", np.arange(40, dtype=np.float32)[:, None])
    files = (f"data.inputs.train={tmp_path}/x.npy", f"data.targets.train={tmp_path}/y.npy")
    of_data = ("data=arrays", *files, "data.sample_shape=[2]", "data.num_outputs=1", "val_fraction=0.25")
    done = train(tmp_path, "model=linear", "loss=mse", *of_data, "batch_size=8")
    with (predicted(done, tmp_path / "csv", 1).path / "predictions.csv").open() as file:
        indices = [(float(row["index"]), float(row["target_0"])) for row in csv.DictReader(file)]
    assert len(indices) == 10 and all(index == target for index, target in indices)

    there = run(tmp_path / "trace", 1, "task=trace", f"run={done.path}", "task.last=1", "logger=none")
    record = torch.load(there.path / "trace" / "1.0", weights_only=True)["loss"]
    ((_, targets),) = record["rows"]["tensor .1 of the batch"]
    assert record["samples"] == [targets.flatten().tolist()]


def test_mappings_and_sequences_have_names(tmp_path: Path) -> None:
    done = train(tmp_path, *HEADS)
    there = predicted(done, tmp_path / "csv", 2, "parallel=ddp")
    with (there.path / "predictions.csv").open() as file:
        names, *rows = csv.reader(file)
    kinds = ["output.kind_0", "output.kind_1", "output.kind_2"]
    classes = ["prediction.kind", "probability.kind"]
    assert names == ["index", "target.kind", "target.size", *classes, *kinds, "output.size"]
    assert len(rows) == 47
    of_size = np.array([np.float32(row[-1]) for row in rows])  # the text represents the float32 exactly
    there = predicted(done, tmp_path / "npy", 1, "predict.format=npy", f"predict.output={tmp_path}/arrays")
    assert np.array_equal(np.load(tmp_path / "arrays" / "output.size.npy"), of_size)
    assert np.load(tmp_path / "arrays" / "output.kind.npy").shape == (47, 3)
    pair = columns_of((torch.zeros(2, 3), {"a": torch.zeros(2)}), torch.tensor([1.0, 2.0]), [4, 5])
    assert list(pair) == ["index", "target", "output.0", "output.1.a"]


@pytest.mark.thorough
def test_samples_with_many_numbers_or_of_many_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyarrow import parquet

    monkeypatch.setattr(prediction_files, "MAX_NUMBERS", 10)
    args = (f"--config-dir={TESTS}/experiments/segmentation", "experiment=segmentation", "batch_size=10")
    done = train(tmp_path / "whole", *args)
    reported = "predict.format=csv: target has 144 numbers per sample, and a table may have 10"
    with pytest.raises(Exception, match=rf"JobFailed: .*\n{reported}"):
        predicted(done, tmp_path / "csv", 1)
    (left,) = (tmp_path / "csv" / "run").iterdir()
    assert json.loads((left / "result.json").read_text())["state"] == "failed"
    assert not [path for path in left.iterdir() if "predictions" in path.name]
    table = parquet.read_table(
        predicted(done, tmp_path / "list", 1, "predict.format=parquet").path / "predictions.parquet"
    )
    arrays = predicted(done, tmp_path / "npy", 1, "predict.format=npy").path / "predictions"
    output = np.load(arrays / "output.npy", mmap_mode="r")
    assert table["output_shape"][0].as_py() == list(output.shape[1:])
    assert np.array_equal(np.array(table["output"][3].as_py(), output.dtype), output[3].ravel())
    assert np.load(arrays / "prediction.npy").shape == np.load(arrays / "target.npy").shape


def test_a_table_of_lists_stays_one_where_samples_are_of_one_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow import parquet

    monkeypatch.setattr(prediction_files, "GROUP_NUMBERS", 20)  # the first two pieces; the third is a group of its own
    with prediction_files.writing("parquet", tmp_path / "a.parquet", 6) as writer:
        for start, length in ((0, 3), (2, 5), (4, 3)):
            writer.add({"index": np.arange(start, start + 2), "output": np.full((2, length), float(start))})
    table = parquet.read_table(tmp_path / "a.parquet")
    assert [len(numbers) for numbers in table["output"].to_pylist()] == [3, 3, 5, 5, 3, 3]
    assert table["index"].to_pylist() == [*range(6)]
    assert parquet.ParquetFile(tmp_path / "a.parquet").num_row_groups == 2


def test_invalid_requests_are_refused_before_anything_is_written(
    here: Callable[..., int],
    convnet: Run,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    for args, reported in (
        (("predict.format=json",), "predict.format=json must be one of csv, parquet, npy"),
        (("predict.output=a.parquet",), "must end in .csv with format=csv"),
        (("predict.format=npy", "predict.output=there"), "must not exist yet"),
        (("predict.format=npy", "predict.output=file"), "must not exist yet"),
        (("split=test",), "split"),
        (("checkpoint=step_9",), "has no checkpoint step_9"),
    ):
        capfd.readouterr()
        assert here("task=predict", f"run={convnet.path}", *args) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert reported in line
    monkeypatch.setattr("runner.errors.find_spec", lambda name: None)
    assert here("task=predict", f"run={convnet.path}", "predict.format=parquet") == 2
    assert "pip install 'experiment-runner[table]'" in capfd.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"there", "file"}
    with pytest.raises(JobFailed, match=r"outputs.a must have one row per sample, and has the shape \[3\]"):
        columns_of({"a": torch.zeros(3)}, torch.zeros(2), [0, 1])
    with pytest.raises(InputError, match="no effect without task=predict"):
        run(tmp_path, 1, "predict.format=npy")


def test_an_objective_without_predict_is_refused(tmp_path: Path) -> None:
    """The class of a factory's objective is unknown before the factory is called, the class of another is not."""
    (tmp_path / "mine" / "objective").mkdir(parents=True)
    (tmp_path / "mine" / "factory_of_objectives.py").write_text(FACTORY)
    for name in ("make", "WithoutPredict"):
        (tmp_path / "mine" / "objective" / f"{name}.yaml").write_text(f"_target_: factory_of_objectives.{name}\n")
        arguments = (f"--config-dir={tmp_path}/mine", f"objective={name}", "metrics=none")
        done = train(tmp_path / name, "model=linear", "data=random", "data.num_train=60", *arguments)
        with pytest.raises(Exception, match=r"objective: \w+ has no predict\(model, batch\)"):
            predicted(done, tmp_path / "predictions", 1)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_list_of_outputs_is_no_list_of_samples(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has two outputs, and a piece two samples; a target of a sample is a list of two, which is collated."""
    (tmp_path / "list_of_outputs.py").write_text(PAIRS)
    monkeypatch.syspath_prepend(tmp_path)
    options = ("model=toy", "data=toy", "data.num_train=20", "data.num_val=5", "batch_size=8", "metrics=none")
    done = train(tmp_path / "train", *options, "objective._target_=list_of_outputs.Pairs", "precision=fp64")
    there = predicted(done, tmp_path / "there", 1, "predict.format=jsonl", f"predict.batch_size={size}")
    rows = [json.loads(line) for line in (there.path / "predictions.jsonl").read_text().splitlines()]
    assert [[*row] for row in rows] == [["index", "target.0", "target.1", "output.0", "output.1"]] * 5
    for row in rows:
        assert row["target.1"] == [2 * value for value in row["target.0"]]
        assert row["output.1"] == [2 * value for value in row["output.0"]]


@pytest.mark.parametrize("ranks", [1, 3])
def test_json_lines_have_outputs_of_any_shape(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample has another number of boxes; the last piece has a single sample."""
    (tmp_path / "boxes.py").write_text(BOXES)
    monkeypatch.syspath_prepend(tmp_path)
    options = ("model=toy", "data=toy", "data.num_train=20", "data.num_val=9", "batch_size=8", "metrics=none")
    done = train(tmp_path / "train", *options, "objective._target_=boxes.Boxes", "precision=fp64")
    mode = f"parallel={'ddp' if ranks > 1 else 'none'}"
    there = predicted(done, tmp_path / "there", ranks, mode, "predict.format=jsonl", "predict.batch_size=4")
    rows = [json.loads(line) for line in (there.path / "predictions.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(9))
    for row in rows:
        count = 1 + int(abs(row["target"][0]) * 10) % 4
        assert len(row["target"]) == 5 and len(row["output"]["boxes"]) == count and row["output"]["label"] is None
