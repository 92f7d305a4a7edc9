"""The norm over the whole model, whatever a rank has of it: everything, shards, or some of the stages."""

from collections.abc import Callable
from pathlib import Path

import pytest
from mode_cases import ONCE, Case, mesh
from worlds import Run, run

# The embedding is tied to the head, so that the first and the last stage of a pipeline have it.
OVERRIDES = (
    *(f"--config-dir={Path(__file__).parent / 'own'}", "task=weight_norm", "precision=fp64", "logger=none"),
    *("model=gpt", "model.dim=8", "model.depth=2", "model.heads=2", "data=sentences", "batch_size=14"),
)
STAGES_AND_SHARDS, AXES = mesh("shard=2 stage=2")


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    "case",
    [*ONCE, pytest.param(Case("mesh", STAGES_AND_SHARDS, AXES), id="mesh", marks=pytest.mark.thorough)],
    ids=str,
)
def test_the_norm_of_the_weights_is_that_of_one_process(
    case: Case, tmp_path: Path, one_process: Callable[..., Run]
) -> None:
    expected = one_process(*OVERRIDES).result["metrics"]["weight_norm"]
    made = run(tmp_path, case.world_size, *OVERRIDES, *case.overrides)
    assert expected > 1 and made.result["metrics"]["weight_norm"] == pytest.approx(expected, rel=1e-12)
