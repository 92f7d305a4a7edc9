"""Tables of numeric features and of classes or numbers to predict, from CSV and Parquet files."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .checks import check_sizes, could_be_classes
from .columns import Columns, read_columns, read_names
from .paths import find_split
from .tensors import TensorData

OTHER_DELIMITERS = {"\t": r"\t", ";": ";", "|": "|", ",": ","}  # as they are typed
TINY = 1e-12  # relative standard deviation below which a feature is constant except for rounding


class Table(TensorData):
    """The features of each row, (num_features,) float32, and its target.

    Args:
        files: for each split paths or patterns of .csv or .parquet files, or lists of them; None for a missing split.
        target: the column of the classes, () int64, or of the number, (1,) float32; several columns are (K,) float32.
        kind: whether one target column contains classes or numbers; auto: text and integers are classes.
        features: the columns of the features in their order; None means all other columns except an index of the rows:
            columns without a name, and the index of a data frame of pandas.
        standardize: shift and scale features to mean 0 and standard deviation 1 on the training split; constant
            features become 0.
        delimiter: one character between the fields of a CSV file; the two characters \\t mean a tab.

    Classes are numbered in the sorted order of the training split's labels, which `classes` contains. `header_lines`
    names the features.
    Raises ValueError if a file or column is missing, a feature is not a finite number, a label does not occur in the
    training split, or sample_shape or num_outputs differ from those of the table.
    """

    def __init__(
        self,
        split: Literal["train", "val", "test"],
        sample_shape: Sequence[int],
        num_outputs: int,
        files: Mapping[str, str | list[str] | None],
        target: str | list[str],
        kind: Literal["auto", "classes", "numbers"] = "auto",
        features: list[str] | None = None,
        standardize: bool = True,
        delimiter: str = ",",
    ) -> None:
        check_sizes(sample_shape, num_outputs)
        delimiter = "\t" if delimiter == r"\t" else delimiter  # a tab is hard to type in a shell
        if len(delimiter) != 1:
            raise ValueError(rf"delimiter={delimiter!r} must be one character; type '\t' for a tab")
        columns = [target] if isinstance(target, str) else list(target)
        if not columns or len(set(columns)) < len(columns):
            raise ValueError(f"target={columns} must name one or more different columns")
        if kind == "classes" and len(columns) > 1:
            raise ValueError(
                f"kind=classes is for one target column, but target={columns} names {len(columns)}; try auto"
            )
        paths = {
            name: [str(path) for path in find_split(files, name, ".csv or .parquet")]
            for name in dict.fromkeys(("train", split))
        }
        names, index = read_names(paths["train"][0], delimiter)
        left_out = [name for name in index if name not in columns] if features is None else []
        others = [name for name in names if name not in columns + left_out]
        self.features = others if features is None else list(features)
        self._check_columns(names, columns, left_out, sample_shape)
        tables = {name: read_columns(path, [*self.features, *columns], delimiter) for name, path in paths.items()}

        train = tables["train"]
        self.classes: list[str] = []  # the label of each class; empty for numbers
        if len(columns) == 1 and (kind == "classes" or (kind == "auto" and train.are_labels(columns[0]))):
            self.classes = train.labels(columns[0])
        hint = kind == "auto" and len(columns) == 1 and not self.classes and could_be_classes(train.numbers(columns))
        if num_outputs != (width := len(self.classes) or len(columns)):
            listed = ", ".join(self.classes[:5]) + (", ..." if width > 5 else "")
            meaning = f"the classes of {columns[0]} ({listed})" if self.classes else "the target columns"
            classes = ", or data.kind=classes for classes" if hint else ""
            raise ValueError(
                f"num_outputs={num_outputs} must be {width}, {meaning}; set data.num_outputs={width}{classes}"
            )
        self.header_lines = [
            f"features: {_listed(self.features)} ({len(self.features)})",
            *([f"left out: {_listed(left_out)}, an index of the rows; data.features can include it"] * bool(left_out)),
            *([f"{columns[0]} contains numbers; if they are classes, set data.kind=classes"] * hint),
        ]
        table = tables[split]
        rows = table.numbers(self.features)  # (N, F) float64
        if standardize:
            trained = train.numbers(self.features)
            deviation = trained.std(0)
            scale = np.where(deviation > TINY * np.abs(trained).max(0), deviation, np.inf)
            rows = (rows - trained.mean(0)) / scale
        super().__init__(torch.from_numpy(rows).to(torch.float32), self._targets(table, columns))

    def _check_columns(
        self, names: list[str], targets: list[str], left_out: list[str], sample_shape: Sequence[int]
    ) -> None:
        for option, wanted in (("target", targets), ("features", self.features)):
            if missing := [name for name in wanted if name not in names]:
                other = next((sign for sign in OTHER_DELIMITERS if len(names) == 1 and sign in names[0]), None)
                hint = f"; try data.delimiter='{OTHER_DELIMITERS[other]}'" if other else ""
                raise ValueError(f"{option}={missing[0]}: the table has no such column; it has {_listed(names)}{hint}")
        if both := sorted(set(targets) & set(self.features)):
            raise ValueError(f"features={self.features} must not contain the target {both[0]}; remove it")
        without = f" without {_listed(left_out)}, an index of the rows" if left_out else ""
        if not self.features:
            raise ValueError(f"features=null: the table has no other columns than {_listed(targets)}{without}")
        if list(sample_shape) != (found := [len(self.features)]):
            raise ValueError(
                f"sample_shape={list(sample_shape)} must be {found}, the number of feature columns{without}; "
                f"set data.sample_shape={found}"
            )

    def _targets(self, table: Columns, columns: list[str]) -> Tensor:
        if not self.classes:
            return torch.from_numpy(table.numbers(columns)).to(torch.float32)  # (N, K)
        return torch.from_numpy(table.label_indices(columns[0], self.classes))  # (N,)


def _listed(names: list[str], most: int = 12) -> str:
    """Return the names of columns for a message, quoted if they are empty or would spoil the line."""
    shown = [name if name.isprintable() and name else repr(name) for name in names[:most]]
    return ", ".join(shown) + (", ..." if len(names) > most else "")
