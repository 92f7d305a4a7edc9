"""adapters=lora in every mode: the numbers of a plain loop with peft, and checkpoints without the frozen weights."""

import shutil
import signal
from pathlib import Path
from typing import Any

import adapted_models
import pytest
import torch
from adapted_models import GPT_WORDS, LLAMA_WORDS, STEPS, Files, plain_loop, write_files
from fault_rig import assert_same, cut, send
from mode_cases import Case
from worlds import Run, run

peft: Any = pytest.importorskip("peft", reason="needs the extra lora")

MODES = (
    *(Case("none", 1), Case("ddp", 2), Case("allreduce", 2), Case("zero", 2), Case("fsdp", 2), Case("fsdp", 3)),
    *(Case("pipeline", 2), Case("ps", 2), Case("ps", 3, ("parallel.forward=remote",)), Case("local_sgd", 2)),
    *(Case("mesh", 4, ("parallel.replicate=2", "parallel.shard=2")), Case("dp", 1)),
)


@pytest.fixture(scope="module")
def gpt_files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("gpt"), adapted_models.gpt)


def is_frozen(name: str) -> bool:
    return "lora_" not in name


def assert_is_plain(made: Run, losses: list[float], model: torch.nn.Module) -> None:
    assert [made.losses[step] for step in range(1, STEPS + 1)] == pytest.approx(losses, rel=1e-9)
    saved = made.saved
    assert not any(is_frozen(name) for name in saved.model())
    state = model.state_dict()
    trained = {name: tensor.read() for name, tensor in saved.model().items()}
    torch.testing.assert_close(trained, {name: state[name] for name in trained}, rtol=0, atol=1e-9)
    assert [*trained] and not [name for name in state if name not in trained and not is_frozen(name)]


@pytest.mark.parametrize(
    "case",
    [case if case.mode in ("ddp", "fsdp", "ps") else pytest.param(case, marks=pytest.mark.thorough) for case in MODES],
    ids=str,
)
def test_a_gpt_equals_a_plain_loop(case: Case, gpt_files: Files, tmp_path: Path) -> None:
    """With averages of the adapters, and two micro-batches."""
    decay = 0.0 if case.mode == "local_sgd" else 0.5  # which refuses averages over the steps
    average_words = [f"ema.decay={decay}"] if decay else []
    words = (*GPT_WORDS, *gpt_files.words, f"init_from={gpt_files.base}", "micro_batches=2", *average_words)
    made = run(tmp_path, case.world_size, *words, *case.overrides)
    losses, model, average = plain_loop(gpt_files, adapted_models.gpt, ["query", "value"], decay)
    assert_is_plain(made, losses, model)
    state, averages = average.state_dict(), {name: tensor.read() for name, tensor in made.saved.average().items()}
    torch.testing.assert_close(averages, {name: state[name] for name in averages}, rtol=0, atol=1e-9)
    assert averages.keys() == (made.saved.model().keys() if decay else set())


@pytest.mark.parametrize(
    "case",
    [
        case if case.mode == "fsdp" else pytest.param(case, marks=pytest.mark.thorough)
        for case in (Case("none", 1), Case("ddp", 2), Case("allreduce", 2), Case("zero", 2), Case("fsdp", 2))
    ],
    ids=str,
)
def test_a_llama_of_transformers_equals_a_plain_loop(case: Case, tmp_path: Path) -> None:
    files = write_files(tmp_path, adapted_models.Llama)
    words = (*LLAMA_WORDS, *files.words, f"init_from={files.base}", "micro_batches=2")
    made = run(tmp_path / "runs", case.world_size, *words, *case.overrides)
    losses, model, _ = plain_loop(files, adapted_models.Llama, ["q_proj", "v_proj"])
    assert_is_plain(made, losses, model)
    log = (made.path / "log.txt").read_text()
    assert "in 4 layers: language.model.layers.0.self_attn.q_proj, " in log and " of them trained" in log


@pytest.mark.fault("kill -9 of a rank that trains adapters", outcome="survived")
def test_a_killed_run_continues_with_the_same_numbers(gpt_files: Files, tmp_path: Path) -> None:
    """Also with dropout in the adapters, whose draws follow the samples, and on another number of ranks."""
    words = (*GPT_WORDS, *gpt_files.words, "adapters.dropout=0.3", "ema.decay=0.5", f"init_from={gpt_files.base}")
    words = (*words, "checkpoint.every_steps=1", "checkpoint.keep_best=0")
    whole = run(tmp_path / "whole", 2, *words, "parallel=fsdp")
    killed = cut(tmp_path / "killed", 2, (*words, "parallel=fsdp"), send(signal.SIGKILL, 1, 2, once_saved=1))
    shutil.copytree(killed.path, tmp_path / "copy")
    assert_same(run(tmp_path / "killed", 2, f"resume='{killed.path}'"), whole)
    alone = run(tmp_path / "copy", 1, f"resume='{tmp_path / 'copy'}'", "parallel=none")
    assert alone.losses == pytest.approx(whole.losses, rel=1e-9)
    assert alone.saved.model().keys() == whole.saved.model().keys()
    torch.testing.assert_close(alone.weights, whole.weights, rtol=0, atol=1e-9)
    found = run(tmp_path / "evaluated", 2, "task=evaluate", f"run='{whole.path}'", "parallel=zero")
    assert found.result["metrics"]["val/loss"] == pytest.approx(whole.result["metrics"]["val/loss"], rel=1e-9)


@pytest.mark.parametrize("mode", ["tp", "mesh"])
def test_sharded_layers_cannot_have_adapters(mode: str, gpt_files: Files, tmp_path: Path) -> None:
    options = ("parallel.tensor=2",) if mode == "mesh" else ()
    with pytest.raises(
        Exception, match=r"parallel\.?\w*=\w+ cannot shard layers that have adapters; try parallel=fsdp"
    ):
        run(tmp_path, 2, *GPT_WORDS, *gpt_files.words, f"parallel={mode}", *options)
    assert not (tmp_path / "run").exists()
