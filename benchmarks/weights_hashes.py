"""Hashes of the weights after ten steps in every mode, to compare two versions of the code.

usage: python benchmarks/weights_hashes.py [--checkout DIR] [--compare FILE] > FILE

Prints one JSON object, "MODE MODEL RANKS" -> weights_sha256 (or the reason for its absence), for the code in DIR, which
may be another git worktree. With --compare, exits with status 1 if a hash differs from the file. Hashes depend on the
kind of CPU and on the version of torch, so create both on one machine, in one environment.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("mlp", "convnet", "transformer")
NUM_RANKS = (1, 2, 4)
TIMEOUT_S = 1800


def hashes(checkout: Path) -> dict[str, str]:
    """Return the hashes after ten steps, on one thread per rank, computed in one sweep."""
    modes = sorted(path.stem for path in (checkout / "conf" / "parallel").glob("*.yaml"))
    varied = [("parallel", modes), ("model", MODELS), ("launcher.nproc_per_node", NUM_RANKS)]
    words = [f"{key}={','.join(map(str, values))}" for key, values in varied]
    words += ["launcher=spawn", "max_steps=10", "threads=1", "logger=none"]
    with tempfile.TemporaryDirectory() as outputs:
        command = [sys.executable, "-m", "runner", "-m", *words, f"outputs={outputs}"]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        (ledger,) = Path(outputs).glob("*/*/ledger.jsonl") or sys.exit(done.stdout + done.stderr)
        found = {}
        for line in map(json.loads, ledger.read_text().splitlines()):
            if "label" in line:
                own = dict(word.partition("=")[::2] for word in line["overrides"])
                name = " ".join(own[key] for key, _ in varied)
                result = ledger.parent / line["label"] / "result.json"
                found[name] = json.loads(result.read_text())["weights_sha256"] if result.exists() else "refused"
    return dict(sorted(found.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose code is run; this repository's by default")
    parser.add_argument("--compare", type=Path, help="what an earlier call has printed")
    given = parser.parse_args()
    found = hashes(given.checkout.resolve())
    print(json.dumps(found, indent=1))
    before = json.loads(given.compare.read_text()) if given.compare else found
    differing = sorted(name for name in before.keys() | found.keys() if before.get(name) != found.get(name))
    for name in differing:
        print(f"{name}: was {before.get(name)}, is {found.get(name)}", file=sys.stderr)
    print(f"{len(found) - len(differing)} of {len(found)} are the same", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
