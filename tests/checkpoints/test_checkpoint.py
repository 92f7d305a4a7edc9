"""Checkpoints: complete or absent, and only read if they are what was saved."""

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

from runner.checkpoints import layout, retention
from runner.checkpoints import save as saving
from runner.checkpoints.layout import TrainState, list_checkpoints, read_train_state, verify
from runner.checkpoints.save_coordination import SaveCoordinator
from runner.checkpoints.saved_state import LocalState, open_checkpoint, weights_sha256
from runner.checkpoints.shard_file import LocalChunk
from runner.parallel.optimizer_state import fill_structure, flatten_optimizer, is_of_rank

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


def position(step: int) -> TrainState:
    return TrainState(step=step, epoch=1, step_in_epoch=step % 7, batch_size=64)


def save(directory: Path, step: int, **tensors: torch.Tensor) -> Path:
    chunks = {f"model.{name}": LocalChunk.of(tensor) for name, tensor in (tensors or {"weight": WEIGHT}).items()}
    return saving.save(directory, LocalState(chunks, {"scaler": {}}), position(step), SaveCoordinator())


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_saved_tensors_are_read_back(tmp_path: Path) -> None:
    """Tensors of any kind and memory layout, also with torch's own reader."""
    path = save(tmp_path, 5, **KINDS)
    assert names(path) == ["manifest.json", "progress.json", "rank_0.safetensors", "state.json"]
    saved = open_checkpoint(path)
    assert read_train_state(path) == position(5)
    assert saved.facts == {"world_size": 1, "scaler": {}}
    here, by_torch = ({f"model.{name}": torch.empty_like(t) for name, t in KINDS.items()} for _ in range(2))
    saved.read(here)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about reading in one process
        load(by_torch, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    for name, tensor in KINDS.items():
        assert torch.equal(here[f"model.{name}"], tensor) and torch.equal(by_torch[f"model.{name}"], tensor), name
    with pytest.raises(ValueError, match=r"has other shapes: model.half \[5\] there and \[4\] here; use the code"):
        saved.read({"model.half": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"lacks model.more"):
        saved.read({"model.more": torch.zeros(4)})


def test_tensors_of_sixteen_bytes_per_element_are_aligned_in_the_file(tmp_path: Path) -> None:
    """A tensor is read as a view of the mapped file, and torch may crash on a misaligned one."""
    for step in range(1, 17):
        name = "a" * step  # the length of the header differs
        saved = open_checkpoint(save(tmp_path, step, **{name: torch.ones(3, dtype=torch.complex128)}))
        assert saved.tensors[f"model.{name}"].read().data_ptr() % 16 == 0


def test_each_rank_writes_its_part_and_reads_what_it_needs(tmp_path: Path) -> None:
    """Rows are sharded over four ranks, or over two of two replicas; an uneven tensor leaves a rank without rows."""
    whole = {"rows": torch.arange(12.0).reshape(6, 2), "copies": torch.arange(10).reshape(5, 2), "plain": torch.ones(3)}

    def act(rank: int, world_size: int) -> list[str]:
        mesh = init_device_mesh("cpu", (4,))
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        placed = {
            "rows": distribute_tensor(whole["rows"], mesh, [Shard(0)]),
            "copies": distribute_tensor(whole["copies"], square, [Replicate(), Shard(0)]),
            "plain": whole["plain"] + rank,  # rank 0's is saved
        }
        chunks = {name: LocalChunk.of(tensor) for name, tensor in placed.items() if is_of_rank(tensor)}
        local = LocalState(chunks, {"ranks": {str(rank): len(placed)}})
        store = dist.FileStore(str(tmp_path / "store"), world_size)
        path = saving.save(tmp_path, local, position(3), SaveCoordinator(rank, world_size, store))
        dist.barrier()  # only rank 0 has waited for the others
        saved = open_checkpoint(path)
        both = [Shard(0), Shard(1)]
        columns, expected = (distribute_tensor(t, square, both) for t in (torch.zeros(6, 2), whole["rows"]))
        copies = distribute_tensor(torch.zeros(5, 2, dtype=torch.int64), mesh, [Shard(0)])
        saved.read({"rows": columns, "copies": copies})
        assert torch.equal(columns.to_local(), expected.to_local())
        assert torch.equal(copies.to_local(), distribute_tensor(whole["copies"], mesh, [Shard(0)]).to_local())
        assert saved.facts["ranks"] == {str(rank): 3 for rank in range(4)}
        return [name for name, chunk in local.chunks.items() if chunk.tensor.numel()]

    written = run_ranks(act, 4, timeout_s=120)
    assert written == [["rows", "copies", "plain"], ["rows", "copies"], ["rows"], []]
    saved = open_checkpoint(tmp_path / "step_3")
    for name, tensor in whole.items():
        assert torch.equal(saved.tensors[name].read(), tensor)


def test_the_newest_checkpoints_are_kept_in_numerical_order(tmp_path: Path) -> None:
    for step in (8, 9, 10, 100):
        save(tmp_path, step)
    retention.retain(tmp_path, keep=2, best=[8], newest=100)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_8", "step_10", "step_100"]
    assert (tmp_path / "last").resolve().name == "step_100" and (tmp_path / "best").resolve().name == "step_8"
    (tmp_path / "step_11.tmp").mkdir()  # left by a crash
    (tmp_path / "step_9.deleting").mkdir()
    retention.remove_leftovers(tmp_path)
    save(tmp_path, 101)
    retention.retain(tmp_path, keep=1, best=[], newest=101)
    assert names(tmp_path) == ["last", "step_101"]


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    """Otherwise the only undamaged checkpoint besides the newest would be removed."""
    for step in (20, 30, 33):
        save(tmp_path, step)
    retention.retain(tmp_path, keep=2, best=[], newest=20, damaged={30})
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_20", "step_30", "step_33"]
    retention.retain(tmp_path, keep=2, best=[], newest=33, damaged={30})
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_20", "step_33"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5)
    path = save(tmp_path, 5, weight=torch.ones(3))
    assert open_checkpoint(path).model()["weight"].read().tolist() == [1, 1, 1]
    assert names(tmp_path) == ["last", "step_5"]


def test_files_of_a_wrong_form_are_refused_despite_right_hashes(tmp_path: Path) -> None:
    """Whoever writes a file can write its hash."""
    path = save(tmp_path, 5)
    files = layout.read_manifest(path)
    for name, text in (
        ("progress.json", "[]"),
        ("progress.json", '{"step": 1}'),
        ("progress.json", '{"step": 5, "epoch": "1", "step_in_epoch": 5, "batch_size": 64}'),
        ("state.json", "3"),
    ):
        other = layout.FileRecord(sha256=hashlib.sha256(text.encode()).hexdigest(), size=len(text))
        before = (path / name).read_text()
        (path / name).write_text(text)
        (path / "manifest.json").write_text(layout.manifest_text({**files, name: other}))
        with pytest.raises(ValueError, match="damaged"):
            verify(path)
        (path / name).write_text(before)
    for text in (
        layout.manifest_text({**files, "../progress.json": files["progress.json"]}),
        layout.manifest_text({"state.json": files["state.json"]}),
        json.dumps({"format": 2, "files": {"state.json": {"size": 3}}}),
        "[]",
    ):
        (path / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match="damaged"):
            verify(path)


def test_an_optimizer_state_may_contain_other_values_than_tensors() -> None:
    state = {"step": 3, "moments": [torch.ones(2), {"low": torch.zeros(1), "on": True}], "none": None}
    tensors, facts = flatten_optimizer({"a.weight": state, "b": {"m": torch.ones(1)}}, [{"lr": 0.1, "betas": (0.9, 1)}])
    facts = json.loads(json.dumps(facts))["optimizer"]
    assert tensors.keys() == {f"optimizer.{n}" for n in ("a.weight.moments.0", "a.weight.moments.1.low", "b.m")}
    assert fill_structure(facts["state"]["a.weight"], tensors) == state and facts["state"].keys() == {"a.weight"}
    with pytest.raises(ValueError, match=r"contains a set as optimizer.a.seen, which a checkpoint cannot store"):
        flatten_optimizer({"a": {"seen": {1}}}, [])


def test_the_hash_covers_names_and_bytes_in_a_fixed_order() -> None:
    a, b = torch.arange(4.0), torch.ones(2, dtype=torch.int64)
    one = weights_sha256({"a": a, "b": b})
    assert one == weights_sha256({"b": b, "a": a})
    assert one != weights_sha256({"a": b, "b": a})
    assert one != weights_sha256({"a": a.nextafter(torch.tensor(9.0)), "b": b})
    assert one == weights_sha256({"a": torch.stack([a, a], 1)[:, 0], "b": b})
    assert weights_sha256({"a": torch.tensor(1.0)}) != weights_sha256({"a": torch.tensor(2.0)})
