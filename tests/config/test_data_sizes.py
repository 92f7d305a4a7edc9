"""sample_shape and num_outputs that are null: the training split determines them."""

import sys
from pathlib import Path

import pytest
from shard_files import save_vectors
from worlds import configure

from runner.errors import InputError

MODEL = ("data=shards", "model=mlp")
DATASET = """
class Data:
    def __init__(self, train: bool, sizes: list[int]):
        self.sample_shape, self.num_outputs = (sizes, 7) if train else ([1], 1)
"""


def test_models_refer_to_the_sizes_that_the_data_has(tmp_path: Path) -> None:
    save_vectors(tmp_path, [5])
    config = configure(*MODEL, f"data.root={tmp_path}")[0]
    assert config.model["sample_shape"] == config.data["sample_shape"] == [8]
    assert config.model["num_outputs"] == config.data["num_outputs"] == 4
    config = configure(*MODEL, f"data.root={tmp_path}", "data.num_outputs=6")[0]
    assert config.model["sample_shape"] == [8] and config.model["num_outputs"] == 6
    config = configure(*MODEL, "data.root=missing", "data.sample_shape=[8]", "data.num_outputs=4")[0]  # not read
    assert config.model["sample_shape"] == [8]


def test_a_custom_dataset_may_have_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data_with_sizes.py").write_text(DATASET)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    sizes = ("data.sample_shape=null", "data.num_outputs=null")
    words = ("model=mlp", "data._target_=data_with_sizes.Data", "+data.sizes=[3,8,9]", "transforms=flip_crop")
    config = configure(*words, *sizes)[0]
    assert config.model["sample_shape"] == [3, 8, 9] and config.model["num_outputs"] == 7
    assert config.transforms["crop"]["size"] == [8, 9]


def test_a_failure_names_the_sizes(tmp_path: Path) -> None:
    message = r"^data.root=missing is not a directory .*; data.sample_shape and data.num_outputs are read there, unless"
    with pytest.raises(InputError, match=message):
        configure(*MODEL, "data.root=missing")
    with pytest.raises(InputError, match=r"^data.window=x must be int \| null"):
        configure(*MODEL, "data.root=missing", "data.window=x")
    with pytest.raises(InputError, match=r"^data.sample_shape=null must be Sequence\[int\]"):
        configure("data=digits", "model=mlp", "data.sample_shape=null")
