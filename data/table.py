"""Tables of numeric features and of classes or numbers to predict, from CSV and Parquet files."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .checks import check_sizes
from .columns import Columns, read_columns, read_names
from .paths import find_files
from .tensors import TensorData

TINY = 1e-12  # relative standard deviation below which a feature is constant except for rounding


class Table(TensorData):
    """The features of each row, (num_features,) float32, and its target.

    Args:
        files: for each split paths or patterns of .csv or .parquet files, or lists of them; None for a missing split.
        target: the column of the classes, () int64, or of the number, (1,) float32; several columns are (K,) float32.
        kind: whether one target column contains classes or numbers; auto: text and integers are classes.
        features: the columns of the features in their order; None means all other columns.
        standardize: shift and scale features to mean 0 and standard deviation 1 on the training split; constant
            features become 0.

    Classes are numbered in the sorted order of the training split's labels, which `classes` contains.
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
        if len(delimiter) != 1:
            raise ValueError(f"delimiter={delimiter} must be one character; try ','")
        columns = [target] if isinstance(target, str) else list(target)
        if not columns or len(set(columns)) < len(columns):
            raise ValueError(f"target={columns} must name one or more different columns")
        if kind == "classes" and len(columns) > 1:
            raise ValueError(
                f"kind=classes is for one target column, but target={columns} names {len(columns)}; try auto"
            )
        paths = {name: _paths(files, name) for name in dict.fromkeys(("train", split))}
        names = read_names(paths["train"][0], delimiter)
        self.features = [name for name in names if name not in columns] if features is None else list(features)
        self._check_columns(names, columns, sample_shape)
        tables = {name: read_columns(path, [*self.features, *columns], delimiter) for name, path in paths.items()}

        train = tables["train"]
        self.classes: list[str] = []  # the label of each class; empty for numbers
        if len(columns) == 1 and (kind == "classes" or (kind == "auto" and train.are_labels(columns[0]))):
            self.classes = train.labels(columns[0])
        if num_outputs != (width := len(self.classes) or len(columns)):
            listed = ", ".join(self.classes[:5]) + (", ..." if width > 5 else "")
            meaning = f"the classes of {columns[0]} ({listed})" if self.classes else "the target columns"
            raise ValueError(f"num_outputs={num_outputs} must be {width}, {meaning}; set data.num_outputs={width}")
        table = tables[split]
        rows = table.numbers(self.features)  # (N, F) float64
        if standardize:
            trained = train.numbers(self.features)
            deviation = trained.std(0)
            scale = np.where(deviation > TINY * np.abs(trained).max(0), deviation, np.inf)
            rows = (rows - trained.mean(0)) / scale
        super().__init__(torch.from_numpy(rows).to(torch.float32), self._targets(table, columns))

    def _check_columns(self, names: list[str], targets: list[str], sample_shape: Sequence[int]) -> None:
        for option, wanted in (("target", targets), ("features", self.features)):
            if missing := [name for name in wanted if name not in names]:
                listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
                raise ValueError(f"{option}={missing[0]}: the table has no such column; it has {listed}")
        if both := sorted(set(targets) & set(self.features)):
            raise ValueError(f"features={self.features} must not contain the target {both[0]}; remove it")
        if list(sample_shape) != (found := [len(self.features)]):
            raise ValueError(
                f"sample_shape={list(sample_shape)} must be {found}, the number of feature columns; "
                f"set data.sample_shape={found}"
            )

    def _targets(self, table: Columns, columns: list[str]) -> Tensor:
        if not self.classes:
            return torch.from_numpy(table.numbers(columns)).to(torch.float32)  # (N, K)
        return torch.from_numpy(table.label_indices(columns[0], self.classes))  # (N,)


def _paths(files: Mapping[str, str | list[str] | None], split: str) -> list[str]:
    value = files.get(split)
    if value is None:
        given = [name for name in ("train", "val", "test") if files.get(name) is not None]
        have = f"there are files for {' and '.join(given)}" if given else "there are no files"
        raise ValueError(f"files.{split}=null: the {split} split needs a .csv or .parquet file; {have}")
    return [str(path) for path in find_files(f"files.{split}", value)]
