"""Checkpoints: complete or absent, and only read when they are what was written."""

import hashlib
import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from runner.errors import JobFailed
from runner.fault_tolerance import checkpoint
from runner.fault_tolerance.checkpoint import open_checkpoint
from runner.fault_tolerance.writers import Writers
from runner.parallel.optimizer_state import pieces_of_rank
from runner.runs import manifest
from runner.runs.train_state import TrainState, available, read_train_state
from runner.training.checkpoint_tensors import fill_skeleton, flatten_optimizer
from runner.training.saved_state import HeldState, Piece, SavedState

WEIGHT = torch.arange(1000.0)
KINDS = {
    "count": torch.tensor(3),
    "scale": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.zeros(0, 4),
    "flags": torch.tensor([True, False, True]),
    "half": torch.arange(5).bfloat16(),
    "angles": torch.randn(3, dtype=torch.complex64),
    "image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "slice": torch.randn(9, 7)[::2, 1:],
}


def progress(step: int) -> TrainState:
    return TrainState(step=step, epoch=1, step_in_epoch=step % 7, batch_size=64)


def held(**tensors: torch.Tensor) -> HeldState:
    return HeldState({f"model.{name}": Piece.of(tensor) for name, tensor in tensors.items()}, {"scaler": {}})


def save(folder: Path, step: int, weight: torch.Tensor = WEIGHT) -> Path:
    return checkpoint.save(folder, held(weight=weight), progress(step), Writers())


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    """By torch's own reader too: tensors of any kind, also where they are not in the order of their elements."""
    path = checkpoint.save(tmp_path, held(**KINDS), progress(5), Writers())
    assert names(path) == ["manifest.json", "progress.json", "rank_0.safetensors", "state.json"]
    saved = open_checkpoint(path)
    assert read_train_state(path) == progress(5)
    assert saved.facts == {"world_size": 1, "scaler": {}}
    here, by_torch = ({f"model.{name}": torch.empty_like(t) for name, t in KINDS.items()} for _ in range(2))
    saved.read(here)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it reads in one process
        load(by_torch, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    for name, tensor in KINDS.items():
        assert torch.equal(here[f"model.{name}"], tensor) and torch.equal(by_torch[f"model.{name}"], tensor), name
    with pytest.raises(ValueError, match=r"has other shapes: model.half \[5\] there and \[4\] here; use the code"):
        saved.read({"model.half": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"has no model.more"):
        saved.read({"model.more": torch.zeros(4)})


def test_each_rank_writes_its_part_and_reads_what_it_needs(tmp_path: Path) -> None:
    """Rows over all four, and over two of two replicas; an uneven one leaves a rank without any."""
    whole = {"rows": torch.arange(12.0).reshape(6, 2), "copies": torch.arange(10).reshape(5, 2), "plain": torch.ones(3)}

    def act(rank: int, world_size: int) -> list[str]:
        mesh = init_device_mesh("cpu", (4,))
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        placed = {
            "rows": distribute_tensor(whole["rows"], mesh, [Shard(0)]),
            "copies": distribute_tensor(whole["copies"], square, [Replicate(), Shard(0)]),
            "plain": whole["plain"] + rank,  # of which rank 0's counts
        }
        own = HeldState(pieces_of_rank(placed), {"ranks": {str(rank): len(placed)}})
        store = dist.FileStore(str(tmp_path / "store"), world_size)
        path = checkpoint.save(tmp_path, own, progress(3), Writers(rank, world_size, store))
        dist.barrier()  # rank 0 alone has waited for the others
        saved = open_checkpoint(path)
        both = [Shard(0), Shard(1)]
        columns, expected = (distribute_tensor(t, square, both) for t in (torch.zeros(6, 2), whole["rows"]))
        saved.read({"rows": columns})
        assert torch.equal(columns.to_local(), expected.to_local())
        assert saved.facts["ranks"] == {str(rank): 3 for rank in range(4)}
        return [name for name, piece in own.pieces.items() if piece.tensor.numel()]

    written = run_ranks(act, 4, timeout_s=120)
    assert written == [["rows", "copies", "plain"], ["rows", "copies"], ["rows"], []]
    saved = open_checkpoint(tmp_path / "step_3")
    for name, tensor in whole.items():
        assert torch.equal(saved.tensors[name].read(), tensor)


def test_newest_stay_and_order_is_by_number(tmp_path: Path) -> None:
    for step in (8, 9, 10, 100):
        save(tmp_path, step)
    checkpoint.retain(tmp_path, keep=2, best=[8], newest=100)
    assert [path.name for path in available(tmp_path)] == ["step_8", "step_10", "step_100"]
    assert (tmp_path / "last").resolve().name == "step_100" and (tmp_path / "best").resolve().name == "step_8"
    (tmp_path / "step_11.tmp").mkdir()  # of a crash
    (tmp_path / "step_9.deleting").mkdir()
    checkpoint.sweep(tmp_path)
    save(tmp_path, 101)
    checkpoint.retain(tmp_path, keep=1, best=[], newest=101)
    assert names(tmp_path) == ["last", "step_101"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5)
    path = save(tmp_path, 5, torch.ones(3))
    assert open_checkpoint(path).model()["weight"].tolist() == [1, 1, 1]
    assert names(tmp_path) == ["last", "step_5"]


@pytest.mark.parametrize(("error", "left"), [(KeyboardInterrupt, ["step_6.tmp"]), (OSError, [])])
def test_a_crash_inside_a_save_leaves_the_older_ones(
    tmp_path: Path, error: type[BaseException], left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed takes no space on the disk, whose being full may be why."""
    save(tmp_path, 5)

    def crash(path: Path, *args: object) -> None:
        path.touch()
        raise error

    monkeypatch.setattr(checkpoint, "write_shard", crash)
    with pytest.raises(JobFailed if error is OSError else error):
        save(tmp_path, 6)
    assert [path.name for path in available(tmp_path)] == ["step_5"]
    assert names(tmp_path) == ["last", "step_5", *left]
    monkeypatch.undo()
    save(tmp_path, 6)
    assert (tmp_path / "last").resolve().name == "step_6"


@pytest.mark.fault("a file of a checkpoint damaged, cut short or missing", outcome="refused")
@pytest.mark.parametrize("name", ["rank_0.safetensors", "state.json", "progress.json", "manifest.json"])
def test_damage_is_found_and_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 5)
    file = path / name
    content = file.read_bytes()
    for bit in range(0, 8 * len(content), max(1, 8 * len(content) // 60)):
        hurt = bytearray(content)
        hurt[bit // 8] ^= 1 << bit % 8
        file.write_bytes(hurt)
        with pytest.raises(ValueError, match=rf"step_5/{name}.*damaged"):
            checkpoint.verify(path)
    for hurt in (content[:-1], b"", content + b"\n", bytes(len(content))):
        file.write_bytes(hurt)
        with pytest.raises(ValueError, match=rf"step_5/{name}.*damaged"):
            checkpoint.verify(path)
    file.unlink()
    with pytest.raises(ValueError, match=rf"step_5/{name}.*damaged"):
        checkpoint.verify(path)


def test_right_hashes_of_a_wrong_form_are_refused(tmp_path: Path) -> None:
    """Whoever writes a file can write its hash."""
    path = save(tmp_path, 5)
    files = manifest.read_manifest(path)
    for name, text in (
        ("progress.json", "[]"),
        ("progress.json", '{"step": 1}'),
        ("progress.json", '{"step": 5, "epoch": "1", "step_in_epoch": 5, "batch_size": 64}'),
        ("state.json", "3"),
    ):
        other = manifest.Written(hashlib.sha256(text.encode()).hexdigest(), len(text))
        before = (path / name).read_text()
        (path / name).write_text(text)
        (path / "manifest.json").write_text(manifest.manifest_text({**files, name: other}))
        with pytest.raises(ValueError, match="damaged"):
            checkpoint.verify(path)
        (path / name).write_text(before)
    outside = {**files, "../progress.json": files["progress.json"]}
    (path / "manifest.json").write_text(manifest.manifest_text(outside))
    with pytest.raises(ValueError, match=r"lists \.\./progress.json, which is no file of a checkpoint"):
        checkpoint.verify(path)
    (path / "manifest.json").write_text(json.dumps({"format": 3}))
    with pytest.raises(ValueError, match="is of format 3, and this version reads up to 2"):
        checkpoint.verify(path)


@pytest.mark.fault("a malicious checkpoint", outcome="refused")
def test_loading_runs_no_code_that_a_file_brings(tmp_path: Path) -> None:
    """Of a checkpoint of before format 2, whose state was pickled: the loader itself must refuse."""
    sentinel = tmp_path / "ran"

    class Malicious:
        def __reduce__(self) -> tuple[object, ...]:
            return sentinel.touch, ()

    torch.save({"model": Malicious()}, tmp_path / "state.pt")
    with pytest.raises(ValueError, match=r"state.pt cannot be read \(UnpicklingError: Weights only load failed"):
        SavedState.open(tmp_path)
    assert not sentinel.exists()


def test_an_optimizer_may_keep_what_is_no_tensor() -> None:
    kept = {"step": 3, "moments": [torch.ones(2), {"low": torch.zeros(1), "on": True}], "none": None}
    tensors, facts = flatten_optimizer({"a.weight": kept, "b": {"m": torch.ones(1)}}, [{"lr": 0.1, "betas": (0.9, 1)}])
    facts = json.loads(json.dumps(facts))["optimizer"]
    assert tensors.keys() == {f"optimizer.{n}" for n in ("a.weight.moments.0", "a.weight.moments.1.low", "b.m")}
    again = {key: fill_skeleton(value, tensors) for key, value in facts["state"]["a.weight"].items()}
    assert again == kept and facts["state"].keys() == {"a.weight"}
    with pytest.raises(ValueError, match=r"keeps a set as optimizer.a.seen, which no checkpoint can hold"):
        flatten_optimizer({"a": {"seen": {1}}}, [])


def test_hash_is_of_names_and_bytes_in_a_fixed_order() -> None:
    a, b = torch.arange(4.0), torch.ones(2, dtype=torch.int64)
    one = checkpoint.weights_sha256({"a": a, "b": b})
    assert one == checkpoint.weights_sha256({"b": b, "a": a})
    assert one != checkpoint.weights_sha256({"a": b, "b": a})
    assert one != checkpoint.weights_sha256({"a": a.nextafter(torch.tensor(9.0)), "b": b})
    assert one == checkpoint.weights_sha256({"a": torch.stack([a, a], 1)[:, 0], "b": b})
    assert checkpoint.weights_sha256({"a": torch.tensor(1.0)}) != checkpoint.weights_sha256({"a": torch.tensor(2.0)})


def test_a_damaged_one_does_not_count_as_one_that_stays(tmp_path: Path) -> None:
    """Else the only sound one besides the newest would go for it."""
    for step in (20, 30, 33):
        save(tmp_path, step)
    checkpoint.retain(tmp_path, keep=2, best=[], newest=20, damaged={30})
    assert [path.name for path in available(tmp_path)] == ["step_20", "step_30", "step_33"]
    checkpoint.retain(tmp_path, keep=2, best=[], newest=33, damaged={30})
    assert [path.name for path in available(tmp_path)] == ["step_20", "step_33"]
