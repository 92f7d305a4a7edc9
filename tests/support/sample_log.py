"""A callback that writes the samples of each step, and their comparison over all ranks."""

import json
from typing import Any

from worlds import Run

from runner import Callback


class SampleLog(Callback):
    """Writes the samples of each step on each rank."""

    def on_start(self, run: Any) -> None:
        self.path = run.directory / f"samples-{run.rank}.jsonl"

    def allows_update(self, update: Any) -> bool:
        line = {"step": update.state.step, "epoch": update.state.epoch}
        with self.path.open("a") as file:
            for micro_batch in update.batch.micro_batches:
                read = micro_batch.targets[: micro_batch.num_samples].tolist()
                file.write(json.dumps(line | {"indices": list(micro_batch.indices), "read": read}) + "\n")
        return True


def samples_of(found: Run) -> dict[tuple[int, int], list[Any]]:
    """Return the index and targets of the samples of each step, over all ranks."""
    steps: dict[tuple[int, int], list[Any]] = {}
    for path in found.path.glob("samples-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            pairs = zip(line["indices"], line["read"], strict=True)
            steps.setdefault((line["step"], line["epoch"]), []).extend(pairs)
    return {step: sorted(pairs) for step, pairs in sorted(steps.items())}
