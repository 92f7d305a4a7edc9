"""The cost of mirroring a run: steps per second with outputs in a local directory and at an address; interleaved.

usage: python benchmarks/mirror.py [--rounds 5] [--steps 400] [--every 100] [--work convnet mlp]
One process trains, and moto's S3 server is another process on loopback, which needs cores as well; a remote server does
not. The rate is that of the steps after the first `--every`; a checkpoint is saved every so many steps.
"""

import argparse
import array
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
WORKS = {
    "convnet": [],  # the model of README's first command
    "mlp": ["model=mlp", "model.hidden=[1024,1024]", "batch_size=64"],  # checkpoints of 5 MiB
}
SERVER = """
from moto.moto_server.threaded_moto_server import ThreadedMotoServer as Server
server = Server('127.0.0.1', 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
input()
"""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


def create_bucket(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    scope = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    connection.request("PUT", "/bucket", headers={"Authorization": scope})
    assert connection.getresponse().status == 200
    connection.close()


def rate(words: Sequence[str], outputs: str, steps: int, every: int, folder: Path) -> tuple[float, float]:
    """Return the steps per second, and the seconds from the last step to the end of the command."""
    file = folder / "times"
    command = [sys.executable, "-m", "runner", f"--config-dir={HERE}", "callbacks=step_times", *words]
    command += [f"callbacks.step_times.file={file}", f"max_steps={steps}", "epochs=100000", "eval_every=100000"]
    command += [f"checkpoint.every_steps={every}", "checkpoint.every_epochs=100000", "checkpoint.keep_best=0"]
    command += ["eval_batches=1", f"outputs={outputs}", f"remote.local_dir={folder / 'local'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    end = time.perf_counter()  # by the clock of the steps
    if done.returncode:
        raise SystemExit(done.stderr)
    ends = array.array("d", file.read_bytes())
    return (steps - every) / (ends[-1] - ends[every - 1]), end - ends[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("rounds", 5), ("steps", 400), ("every", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--work", choices=WORKS, nargs="*", default=list(WORKS))
    args = parser.parse_args()
    pipe = subprocess.PIPE
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true"}
    os.environ |= CREDENTIALS | endpoint
    create_bucket(port)
    print(f"{args.rounds} rounds of {args.steps} steps, a checkpoint every {args.every}, load {os.getloadavg()[0]:.1f}")
    print("| work | outputs | best, steps/s | median, steps/s | after the last step, s, median |")
    print("|---|---|---|---|---|")
    for work in args.work:
        found: dict[str, list[tuple[float, float]]] = {"local": [], "s3://": []}
        for number in range(args.rounds):
            for kind, results in found.items():
                with tempfile.TemporaryDirectory() as scratch:
                    outputs = scratch if kind == "local" else f"s3://bucket/{work}-{number}"
                    results.append(rate(WORKS[work], outputs, args.steps, args.every, Path(scratch)))
        for kind, results in found.items():
            rates, ends = zip(*results, strict=True)
            values = (max(rates), statistics.median(rates), statistics.median(ends))
            print(f"| {work} | {kind} | {' | '.join(f'{value:,.1f}' for value in values)} |")
        ratios = sorted(there[0] / here[0] for here, there in zip(*found.values(), strict=True))
        print(json.dumps({"work": work, "s3/local": [round(ratio, 3) for ratio in ratios]}), file=sys.stderr)
    server.kill()
    server.wait()


if __name__ == "__main__":
    main()
