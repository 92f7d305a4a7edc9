"""Tables: columns of CSV and Parquet files as features and targets, classes from labels, and refused files."""

import csv
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
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
        ([*ROWS, [1, 2, "NA", 1, 0, 0]], {}, r".*train\.csv, line 6: kind is missing \(NA\); remove the row, or "),
        ([[1, 2, 0], [1, 2, "nan"]], {"kind": "classes"}, r".*train\.csv, line 3: kind is missing \(nan\); remove"),
        ([[1, 2, 0], [1, 2, "?"]], {"kind": "classes"}, r".*train\.csv, line 3: kind is missing \(\?\); remove"),
        ([[1, 2, 0.0], [1, 2, 1.0]], {}, "num_outputs=3 must be 1, .*=1, or data.kind=classes for classes$"),
        ([[1, 2, "a\nb"], ["", 2, "c"], [1, 1, 1]], {"num_outputs": 3}, r".*train\.csv, line 4: width is missing"),
        ([*ROWS, [1, 2]], {}, r".*train\.csv, line 6: has 2 fields, but the first line has 6"),
        (ROWS, {"target": []}, r"target=\[\] must name one or more"),
        (ROWS, {"target": ["wet", "cold"], "kind": "classes"}, "kind=classes is for one target column"),
    ],
)  # fmt: skip
def test_tables_that_do_not_fit_are_refused(rows, options, message, write):
    with pytest.raises(ValueError, match=f"^{message}"):
        table(write(rows=rows, header=HEADER[: len(rows[0])]), **options)


def test_missing_files_columns_and_labels_are_named(write, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"^files\.val=null: the val split needs .*; there are files for train$"):
        table(write(), "val")
    with pytest.raises(ValueError, match=r"train\.csv has 2 columns, of which several are called a; fix the file"):
        table(write(header=["a", "a"], rows=[[1, 2]]))
    for rows, message in (
        ([[1, 2, "plum"]], r"val\.csv, line 2: kind is 'plum', which no training row has"),
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
    with pytest.raises(ValueError, match=r"needs pyarrow; pip install 'experiment-runner\[table\]', or convert it"):
        table(path)


LABELS = {
    "integers": ([0, 1, None], "int64"),
    "large integers": ([2**60, 1, None], "uint64"),
    "numbers": ([0.0, 1.0, None], "float64"),
    "NaN": ([0.0, 1.0, float("nan")], "float64"),
    "booleans": ([False, True, None], "bool"),
    "decimals": ([Decimal("0.5"), Decimal(1), None], pyarrow.decimal128(3, 1)),
    "text": (["no", "yes", None], "string"),
    "empty text": (["no", "yes", ""], "string"),
    "categories": (["no", "yes", None], "dictionary"),
    "nothing": ([None, None, None], "null"),
}


@pytest.mark.parametrize("kind", ["auto", "classes"])
@pytest.mark.parametrize("values", LABELS)
def test_missing_values_of_parquet_files_are_refused(values, kind, tmp_path):
    values, dtype = LABELS[values]
    column = (
        pyarrow.array(values, pyarrow.string()).dictionary_encode()
        if dtype == "dictionary"
        else (pyarrow.array(values, dtype))
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"a": [1.0, 2.0, 3.0], "label": column}), path := str(tmp_path / "x.parquet")
    )
    row = 1 if dtype == "null" else 3
    with pytest.raises(ValueError, match=rf"x\.parquet, row {row}: label is (missing|nan)"):
        table(path, sample_shape=(1,), num_outputs=2, target="label", features=["a"], kind=kind)
    if kind == "auto" and values[2] != "":  # as a feature
        with pytest.raises(ValueError, match=rf"x\.parquet, row {row}: label is missing"):
            table(path, sample_shape=(1,), num_outputs=1, target="a", features=["label"])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            [date(2020, 1, 1)],
            r"x\.parquet: label has the type date32\[day\], but must contain numbers, booleans or text",
        ),
        ([[1.0]], r"x\.parquet: label has the type list<.*>, but must contain"),
        ([{"a": 1}], r"x\.parquet: label has the type struct<.*>, but must contain"),
        ([b"a"], r"x\.parquet: label has the type binary, but must contain"),
    ],
)
def test_other_types_of_parquet_columns_are_refused(column, message, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"a": [1.0], "label": column}), path := str(tmp_path / "x.parquet"))
    for target, feature in (("label", "a"), ("a", "label")):
        with pytest.raises(ValueError, match=message):
            table(path, sample_shape=(1,), num_outputs=1, target=target, features=[feature], kind="classes")


def test_types_of_parquet_columns(tmp_path):
    columns = {
        "a": pyarrow.array([1, 2, 3], "uint8"),
        "b": pyarrow.array([True, False, True]),
        "c": pyarrow.array([Decimal("1.50"), Decimal(2), Decimal(3)]),
        "d": pyarrow.array(["1", "2", "2.5"]).dictionary_encode(),
        "label": pyarrow.array(["no", "yes", "no"], "large_string").dictionary_encode(),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path := str(tmp_path / "x.parquet"))
    data = Table("train", [4], 2, {"train": path}, "label", standardize=False)
    assert data.samples.tolist() == [[1, 1, 1.5, 1], [2, 0, 2, 2], [3, 1, 3, 2.5]]
    assert data.classes == ["no", "yes"] and data.targets.tolist() == [0, 1, 0]


def test_an_index_of_the_rows_is_no_feature(write, tmp_path):
    frame = pandas.DataFrame({"a": [1.0, 2.0, 3.0], "label": [0, 1, 0]})
    for number, (index, name) in enumerate([([5, 7, 6], None), ([5, 7, 6], "number"), (["x", "y", "z"], "a b")]):
        frame.set_axis(pandas.Index(index, name=name)).to_parquet(path := str(tmp_path / f"{number}.parquet"))
        data = Table("train", [1], 2, {"train": path}, "label")
        assert data.features == ["a"]
        left_out = f"left out: {name or '__index_level_0__'}, an index of the rows; data.features can include it"
        assert data.header_lines == ["features: a (1)", left_out]
    with pytest.raises(ValueError, match=r"must be \[1\], the number of feature columns without a b, an index of the"):
        Table("train", [2], 2, {"train": path}, "label")
    chosen = Table(
        "train", [2], 2, {"train": str(tmp_path / "0.parquet")}, "label", features=["a", "__index_level_0__"]
    )
    assert len(chosen.header_lines) == 1

    for names in (["", "a", "label"], ["Unnamed: 0", "a", "label"], ["Unnamed: 0.1", "a", "label"]):
        path = write(header=names, rows=[[0, 1.0, "p"], [1, 2.0, "q"]])
        data = Table("train", [1], 2, {"train": path}, "label")
        assert (
            data.header_lines[1]
            == f"left out: {names[0] or repr('')}, an index of the rows; data.features can include it"
        )
    several = Table(
        "train", [1], 2, {"train": write(header=["", "", "a", "label"], rows=[[0, 1, 2, 3], [0, 2, 3, 4]])}, "label"
    )
    assert several.features == ["a"]
    with pytest.raises(
        ValueError, match=r"^features=null: the table has no other columns than label without '', an index"
    ):
        Table("train", [1], 2, {"train": write(header=["", "label"], rows=[[0, 1], [1, 2]])}, "label")


def test_the_header_names_features_and_numbers_that_could_be_classes(write):
    path = write(header=[*(f"x{number}" for number in range(14)), "y"], rows=[[*range(14), 0.0], [*range(14), 1.0]])
    data = Table("train", [14], 1, {"train": path}, "y")
    assert data.header_lines == [
        "features: x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, ... (14)",
        "y contains numbers; if they are classes, set data.kind=classes",
    ]
    for options in ({"kind": "numbers"}, {"kind": "classes", "num_outputs": 2}):
        assert (
            len(Table("train", [14], **{"num_outputs": 1, **options}, files={"train": path}, target="y").header_lines)
            == 1
        )


def test_files_of_other_endings_encodings_and_delimiters(write, tmp_path):
    path = write("train.tsv", delimiter="\t")
    assert table(path, delimiter="\\t").targets.tolist() == [2, 0, 1, 0]
    for wrong in (";;", ""):  # Hydra drops a tab
        with pytest.raises(ValueError, match=rf"^delimiter='{wrong}' must be one character; type '\\t' for a tab$"):
            table(path, delimiter=wrong)
    with pytest.raises(ValueError, match=r"^target=kind: the table has no such column; .*; try data.delimiter='\\t'$"):
        table(path)
    for name in ("x.pq", "y.data"):
        Path(write("z.parquet")).rename(tmp_path / name)
        assert table(str(tmp_path / name)).targets.tolist() == [2, 0, 1, 0]
    rows = "".join(f"{number},{number},caf\u00e9\n" for number in range(4000))
    (tmp_path / "latin.csv").write_bytes(b"width,height,kind\n" + rows.encode()[:-5] + b"\xe9\n")
    with pytest.raises(ValueError, match=r"latin\.csv, line 4001: is not UTF-8 \(.*\); convert the file to UTF-8$"):
        table(str(tmp_path / "latin.csv"))
    (tmp_path / "latin.csv").write_bytes((tmp_path / "latin.csv").read_bytes().replace(b"\n", b"\r"))
    with pytest.raises(ValueError, match=r"latin\.csv, line 4001: is not UTF-8"):
        table(str(tmp_path / "latin.csv"))
    content = bytearray(Path(write("z.parquet")).read_bytes())
    content[8:40] = b"\xff" * 32  # the first page
    (tmp_path / "z.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"z\.parquet cannot be read: "):
        table(str(tmp_path / "z.parquet"))
    text = pyarrow.array([b"\xff\xfe"] * 3).cast(pyarrow.string(), safe=False)
    bad = pyarrow.StringArray.from_buffers(3, *text.buffers()[1:])
    pyarrow.parquet.write_table(pyarrow.table({"width": bad, "height": bad, "kind": bad}), tmp_path / "z.parquet")
    with pytest.raises(ValueError, match=r"z\.parquet cannot be read: "):
        table(str(tmp_path / "z.parquet"))
    same = pyarrow.Table.from_arrays([pyarrow.array([1])] * 3, names=["a", "a", "label"])
    pyarrow.parquet.write_table(same, tmp_path / "same.parquet")
    with pytest.raises(ValueError, match=r"same\.parquet has 3 columns, of which several are called a; fix the file"):
        table(str(tmp_path / "same.parquet"))
