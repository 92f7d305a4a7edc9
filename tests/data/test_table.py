"""Tables: columns of CSV and Parquet files as features and targets, classes from labels, and refused files."""

import csv
import sys

import numpy as np
import pytest
import torch
from data_sets import assert_both_ways_agree
from runner.shipped.data.table import Table

HEADER = ["width", "height", "kind", "price", "wet", "cold"]
ROWS = [
    [1.5, 10, "pear", 2.25, 1, 0],
    [2.5, 10, "apple", 3.5, 0, 0],
    [3.5, 10, "fig", 1.0, 1, 1],
    [4.5, 10, "apple", 0.5, 0, 1],
]


@pytest.fixture
def write(tmp_path):
    def write(name="train.csv", rows=ROWS, header=HEADER, delimiter=","):
        path = tmp_path / name
        if path.suffix == ".parquet":
            import pyarrow
            import pyarrow.parquet

            columns = {key: [row[place] for row in rows] for place, key in enumerate(header)}
            pyarrow.parquet.write_table(pyarrow.table(columns), path)
        else:
            with path.open("w", newline="") as file:
                csv.writer(file, delimiter=delimiter).writerows([header, *rows])
        return str(path)

    return write


def table(
    path, split="train", sample_shape=(2,), num_outputs=3, target="kind", features=("width", "height"), **options
):
    files = path if isinstance(path, dict) else {"train": path}
    return Table(split, list(sample_shape), num_outputs, files, target, features=list(features), **options)


@pytest.mark.parametrize("name", ["train.csv", "train.parquet"])
def test_classes_are_numbered_in_the_order_of_their_labels(name, write):
    data = table(write(name), standardize=False)
    assert data.classes == ["apple", "fig", "pear"] and data.targets.tolist() == [2, 0, 1, 0]
    assert data.targets.dtype == torch.int64 and data.samples.dtype == torch.float32
    assert data.samples.tolist() == [[1.5, 10], [2.5, 10], [3.5, 10], [4.5, 10]]
    longer = table(write(name, ROWS * 3), standardize=False)
    assert_both_ways_agree(longer)


@pytest.mark.parametrize("name", ["train.csv", "train.parquet"])
@pytest.mark.parametrize(
    ("options", "targets"),
    [
        ({"target": "price", "num_outputs": 1}, [[2.25], [3.5], [1], [0.5]]),
        ({"target": ["price"], "num_outputs": 4, "kind": "classes"}, [2, 3, 1, 0]),
        ({"target": "wet", "num_outputs": 2}, [1, 0, 1, 0]),
        ({"target": "wet", "num_outputs": 1, "kind": "numbers"}, [[1], [0], [1], [0]]),
        ({"target": ["wet", "cold"], "num_outputs": 2}, [[1, 0], [0, 0], [1, 1], [0, 1]]),
    ],
)
def test_targets(name, options, targets, write):
    data = table(write(name), **options)
    assert data.targets.tolist() == targets
    assert data.targets.is_floating_point() == isinstance(targets[0], list)


def test_integers_are_classes_in_numerical_order(write):
    path = write(rows=[[1, 2, label] for label in (10, 9, -1, 9)], header=HEADER[:3])
    data = Table("train", [2], 3, {"train": path}, "kind")
    assert data.features == ["width", "height"]  # all other columns
    assert data.classes == ["-1", "9", "10"] and data.targets.tolist() == [2, 1, 0, 1]


def test_features_are_standardized_as_the_training_split_is(write):
    path = {"train": write(), "test": write("test.csv", [[8.0, 12, "fig"]], HEADER[:3])}
    train, test = table(path), table(path, "test")
    widths = np.array([row[0] for row in ROWS])
    assert train.samples[:, 0].tolist() == pytest.approx(((widths - 3) / widths.std()).tolist())
    assert train.samples[:, 1].tolist() == [0, 0, 0, 0]  # a constant
    assert test.samples[0].tolist() == pytest.approx([(8 - 3) / widths.std(), 0])
    assert test.targets.tolist() == [1]  # numbered as in training


def test_several_files_are_one_table(write, tmp_path):
    write("part-1.csv"), write("part-0.csv", ROWS[:1])
    data = table(str(tmp_path / "part-*.csv"), standardize=False)
    assert data.samples[:, 0].tolist() == [1.5, 1.5, 2.5, 3.5, 4.5]
    both = table([write("x.parquet"), write("y.csv", ROWS[:2])], standardize=False)
    assert both.targets.tolist() == [2, 0, 1, 0, 2, 0]


def test_forms_of_csv_files(write, tmp_path):
    path = write(delimiter=";")
    assert table(path, delimiter=";").targets.tolist() == [2, 0, 1, 0]
    text = '\ufeffwidth, height ,kind\n1,2,"a\nb"\n\n3,4, c \n5,6,c\n'
    (tmp_path / "odd.csv").write_text(text, encoding="utf-8")
    data = table(str(tmp_path / "odd.csv"), num_outputs=2)
    assert data.classes == ["a\nb", "c"] and data.targets.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (ROWS, {"num_outputs": 10}, r"num_outputs=10 must be 3, the classes of kind \(apple, fig, pear\); set "),
        (ROWS, {"target": ["wet", "cold"]}, r"num_outputs=3 must be 2, the target columns; set data\.num_outputs=2"),
        (ROWS, {"sample_shape": (4,)}, r"sample_shape=\[4\] must be \[2\], .*; set data\.sample_shape=\[2\]"),
        (ROWS, {"features": ["width", "depth"]}, "features=depth: the table has no such column"),
        (ROWS, {"features": ["width", "kind"]}, "features=.* must not contain the target kind; remove it"),
        (ROWS, {"features": ["kind", "cold"], "target": "price", "num_outputs": 1}, r".*train\.csv, line 2: kind is "),
        ([*ROWS, [1, "nan", "fig", 1, 0, 0]], {}, r".*train\.csv, line 6: height is 'nan', but must be"),
        ([*ROWS, [1, 2, "", 1, 0, 0]], {}, r".*train\.csv, line 6: kind is missing; fix the file"),
        ([*ROWS, [1, 2]], {}, r".*train\.csv, line 6: has 2 fields, but the first line has 6"),
        (ROWS, {"target": []}, r"target=\[\] must name one or more"),
        (ROWS, {"target": ["wet", "cold"], "kind": "classes"}, "kind=classes is for one target column"),
    ],
)  # fmt: skip
def test_tables_that_do_not_fit_are_refused(rows, options, message, write):
    with pytest.raises(ValueError, match=f"^{message}"):
        table(write(rows=rows), **options)


def test_missing_files_columns_and_labels_are_named(write, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"^files\.val=null: the val split needs .*; there are files for train$"):
        table(write(), "val")
    with pytest.raises(ValueError, match=r"train\.csv, line 1: must be different column names, not 'a,a'; fix"):
        table(write(header=["a", "a"], rows=[[1, 2]]))
    for rows, message in (
        ([[1, 2, "plum"]], r"val\.csv, line 2: kind is 'plum', which does not occur in the training split"),
        ([[1, 2]], r"val\.csv has no column kind, which the first file of the training split has"),
    ):
        with pytest.raises(ValueError, match=message):
            table({"train": write(), "val": write("val.csv", rows, HEADER[: len(rows[0])])}, "val")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"bad\.parquet cannot be read: "):
        table(str(tmp_path / "bad.parquet"))
    path = write("train.parquet", [[1.0, None, "fig"]], HEADER[:3])
    with pytest.raises(ValueError, match=r"train\.parquet, row 1: height is missing"):
        table(path, num_outputs=1)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"needs pyarrow; pip install 'experiment-runner\[table\]', or use CSV"):
        table(path)
