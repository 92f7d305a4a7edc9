"""Arrays in NumPy's files: types, shapes, memory mapping, and the files of each split."""

import pickle

import numpy as np
import pytest
import torch
from data_sets import assert_both_ways_agree
from runner.shipped.data.arrays import Arrays

RANDOM = np.random.default_rng(0)


@pytest.fixture
def write(tmp_path):
    def write(inputs, targets, split="train", archive=False):
        """Write inputs and targets, and return their paths as options."""
        if archive:
            np.savez(tmp_path / "all.npz", **{f"x_{split}": inputs, f"y_{split}": targets})
            return {
                "inputs": {split: f"{tmp_path}/all.npz/x_{split}"},
                "targets": {split: f"{tmp_path}/all.npz/y_{split}"},
            }
        np.save(tmp_path / "x.npy", inputs)
        np.save(tmp_path / "y.npy", targets)
        return {"inputs": {split: f"{tmp_path}/x.npy"}, "targets": {split: f"{tmp_path}/y.npy"}}

    return write


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("kind", ["f8", ">f4", "u1", "?"])
def test_inputs_of_any_number_type(kind, archive, write):
    inputs = (RANDOM.random((20, 3, 4)) * 100).astype(kind)
    data = Arrays("train", [3, 4], 5, **write(inputs, np.arange(20, dtype="u1") % 5, archive=archive))
    samples, targets = data.__getitems__([4, 0, 19])
    expected = torch.float32 if "f" in kind else torch.int64
    assert samples.dtype == expected and targets.dtype == torch.int64 and len(data) == 20
    assert torch.equal(samples, torch.tensor(inputs[[4, 0, 19]].astype("f8")).to(expected))
    assert targets.tolist() == [4, 0, 4]
    assert_both_ways_agree(data)


def test_an_npy_file_is_mapped_and_not_copied_to_workers(write):
    data = Arrays("train", [1000], 1, **write(RANDOM.random((100, 1000)), RANDOM.random(100)))
    pickled = pickle.dumps(data)
    assert len(pickled) < 2000 and torch.equal(pickle.loads(pickled)[3][0], data[3][0])


@pytest.mark.parametrize(
    ("targets", "num_outputs", "shape", "kind"),
    [
        (np.arange(20) % 4, 4, (), torch.int64),
        (RANDOM.random(20), 1, (1,), torch.float32),
        (RANDOM.random((20, 3)), 3, (3,), torch.float32),
        (np.zeros((20, 8, 8), dtype="u1"), 6, (8, 8), torch.int64),
    ],
)
def test_targets(targets, num_outputs, shape, kind, write):
    target = Arrays("train", [2], num_outputs, **write(RANDOM.random((20, 2)), targets))[5][1]
    assert (target.shape, target.dtype) == (shape, kind)
    assert torch.equal(target, torch.tensor(targets[5]).to(kind).reshape(shape))


def test_images_of_bytes_are_divided_and_may_lack_their_channel(write):
    images = RANDOM.integers(0, 256, (20, 8, 8), dtype="u1")
    data = Arrays("test", [1, 8, 8], 2, **write(images, np.zeros(20, int), "test"), divisor=255)
    assert torch.equal(data[3][0], torch.from_numpy(images[3]).float()[None] / 255)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (
            np.zeros((20, 2)),
            np.zeros(19, int),
            r"targets\.train=.*y\.npy must have a row for each of the 20 .*has 19",
        ),
        (np.zeros((20, 3)), np.zeros(20, int), r"sample_shape=\[2\] must be \[3\], .*; set data\.sample_shape=\[3\]"),
        (np.zeros((20, 2)), np.arange(20), r"num_outputs=2 must be above .* from 0 to 19; set data\.num_outputs=20"),
        (np.zeros((20, 2)), np.arange(20) - 1, r"num_outputs=2 must be above every class, .*; number them from 0"),
        (np.zeros((20, 2)), np.zeros((20, 5)), r"num_outputs=2 must be 5, the .*; set data\.num_outputs=5"),
        (np.array([["a", "b"]] * 20), np.zeros(20, int), r".*x\.npy must contain rows of numbers, not <U1 of shape "),
        (np.array([[{}, 1]] * 20), np.zeros(20, int), r".*x\.npy cannot be read as an array: "),
    ],
)
def test_arrays_that_do_not_fit_are_refused(inputs, targets, message, write):
    with pytest.raises(ValueError, match=f"^{message}"):
        Arrays("train", [2], 2, **write(inputs, targets))


def test_missing_files_are_named(write, tmp_path):
    paths = write(np.zeros((20, 2)), np.zeros(20, int), archive=True)
    for path, message in (
        ("none.npy", "cannot be read as an array: No such file or directory"),
        ("all.npz/x", r"cannot be read as an array: name one of its arrays: .*all\.npz/x_train, .*y_train"),
        ("all.npz", "name one of its arrays"),
        ("bad.npy", "cannot be read as an array: "),
    ):
        (tmp_path / "bad.npy").write_bytes(b"\x93NUMPY\x01")
        with pytest.raises(ValueError, match=message):
            Arrays("train", [2], 2, {"train": f"{tmp_path}/{path}"}, paths["targets"])
    with pytest.raises(ValueError, match=r"^inputs\.val=null: the val split needs a file, .*; inputs has train$"):
        Arrays("val", [2], 2, **paths)
    with pytest.raises(ValueError, match=r"^divisor=0 must be above 0, or null; try 255"):
        Arrays("train", [2], 2, **paths, divisor=0)


def test_names_of_arrays_may_contain_slashes_and_damaged_archives_are_named(tmp_path):
    values = RANDOM.random((20, 2))
    (tmp_path / "runs.npz").mkdir()  # a directory
    path = tmp_path / "runs.npz" / "all.npz"
    np.savez_compressed(path, **{"train/x": values, "x.npz/y": np.arange(20) % 2})
    data = Arrays("train", [2], 2, {"train": f"{path}/train/x"}, {"train": f"{path}/x.npz/y"})
    assert torch.equal(data[3][0], torch.tensor(values[3]).float()) and int(data[3][1]) == 1
    for start in (0, 100):
        content = bytearray(path.read_bytes())
        content[start : start + 30] = b"\xff" * 30
        (tmp_path / "bad.npz").write_bytes(content if start else content[:100])
        with pytest.raises(ValueError, match=r"bad\.npz/train/x cannot be read as an array: "):
            Arrays("train", [2], 2, {"train": f"{tmp_path}/bad.npz/train/x"}, {"train": f"{path}/x.npz/y"})


def test_numbers_that_could_be_classes_and_integers_that_do_not_fit_are_reported(write):
    inputs, targets = np.zeros((20, 2)), np.arange(20) % 2 * 1.0
    data = Arrays("train", [2], 1, **write(inputs, targets))
    assert len(data.header_lines) == 1 and data.header_lines[0].endswith("if they are classes, save them as integers")
    assert Arrays("train", [2], 1, **write(inputs, targets[:, None])).header_lines == data.header_lines
    with pytest.raises(ValueError, match=r"^num_outputs=2 must be 1, .*=1, or save classes as integers$"):
        Arrays("train", [2], 2, **write(inputs, targets))
    assert Arrays("train", [2], 1, **write(inputs, targets / 3)).header_lines == []
    data = Arrays("train", [2], 1, **write(np.full((20, 2), 2**63, np.uint64), targets))
    with pytest.raises(ValueError, match=rf"integers must be below 2\^63, not {2**63}"):
        data[0]
