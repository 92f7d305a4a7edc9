"""Samples per second of data=shards, from a disk and from S3, and of other readers of the same images.

usage: python benchmarks/shard_reading.py [--images 20000] [--rounds 3] [--workers 2] [--compute-us 0] [--only NAMES]
Each measurement reads every image once, in a new process and in a random order, and decodes it to float32. The readers
are interleaved. A server of moto on loopback stands in for S3, and answers each request after 50 ms; nothing has been
copied from it before. The process sleeps `--compute-us` for each sample, in the place of training. WebDataset and
litData are measured if they are installed. Memory is that of the process and its children (PSS).
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from runner.shipped.data.image_files import decode_image, scale_and_crop
from runner.shipped.data.image_folder import ImageFolder
from runner.shipped.data.shards.dataset import Shards

from runner.input.loader import Loader
from runner.input.sampler import Sampler
from runner.input.source import Source

SHAPE, CLASSES, SHARD, BATCH, WINDOW, LATENCY_S = [3, 58, 58], 2, 800, 100, 4, 0.05
READERS = ("shards", "shards, S3", "shards, S3, not ahead", "image_folder", "WebDataset", "litData")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
SERVER = """
import json, sys, threading, time
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
latency_s, moto, counts = float(sys.argv[1]), DomainDispatcherApplication(create_backend_app), [0, 0]
def answer(environ, start):
    time.sleep(latency_s)
    parts = list(moto(environ, start))
    if environ["REQUEST_METHOD"] == "GET":
        counts[:] = counts[0] + 1, counts[1] + sum(map(len, parts))
    return parts
class Quiet(WSGIRequestHandler):
    def log_request(self, *arguments): pass
server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=Quiet)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
for line in sys.stdin:
    print(json.dumps(counts), flush=True)
    counts[:] = 0, 0
"""
UPLOAD = """
import sys
from pathlib import Path
from urllib.request import Request, urlopen
from obstore.store import S3Store
scope = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
urlopen(Request(f"{sys.argv[1]}/images", method="PUT", headers={"Authorization": scope}))
store = S3Store("images", endpoint=sys.argv[1], client_options={"allow_http": True})
for path in Path(sys.argv[2]).iterdir(): store.put(f"shards/{path.name}", path)
"""


def save(root: Path, count: int) -> None:
    """Write PNG images of noise, about 10 kB each, as files, as tar files, and as chunks of litData."""
    generator = np.random.default_rng(0)
    for first in range(0, count, SHARD):
        (root / "shards").mkdir(parents=True, exist_ok=True)
        with tarfile.open(root / "shards" / f"{first:08}.tar", "w") as tar:
            for number in range(first, min(first + SHARD, count)):
                Image.fromarray(generator.integers(0, 256, (58, 58, 3), np.uint8)).save(file := io.BytesIO(), "png")
                path = root / "images" / "train" / str(number % CLASSES) / f"{number:08}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.getvalue())
                for extension, content in (("png", file.getvalue()), ("cls", str(number % CLASSES).encode())):
                    member = tarfile.TarInfo(f"{number:08}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    Shards("train", root=str(root / "shards"))  # writes the index
    if find_spec("litdata"):
        from litdata import optimize

        files = ImageFolder("train", SHAPE, CLASSES, str(root / "images")).files
        optimize(_read_file, files, str(root / "chunks"), chunk_bytes="8MB", num_workers=1)


def _read_file(file: tuple[str, int]) -> dict[str, Any]:
    return {"png": Path(file[0]).read_bytes(), "cls": file[1]}


def _decode(png: bytes, target: Any) -> tuple[torch.Tensor, int]:
    image = scale_and_crop(decode_image(io.BytesIO(png), "RGB"), *SHAPE[1:])
    return image.to(torch.float32).div_(255), int(target)


def _decode_fields(fields: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return _decode(fields["png"], fields["cls"])


def batches(reader: str, root: Path, port: str, workers: int, seed: int) -> Iterator[int]:
    """Yield the number of samples of each batch that a reader returns."""
    if reader == "litData":
        from litdata import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(str(root / "chunks"), shuffle=True, seed=seed, transform=_decode_fields)
        loader: Any = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers)
        return (len(images) for images, _ in loader)
    if reader == "WebDataset":
        import webdataset

        urls = sorted(map(str, (root / "shards").glob("*.tar")))
        dataset = webdataset.WebDataset(urls, shardshuffle=100, seed=seed).shuffle(WINDOW * SHARD).map(_decode_fields)
        loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, num_workers=workers)
        return (len(images) for images, _ in loader)
    options = {"endpoint": f"http://127.0.0.1:{port}", "allow_http": True}
    where = "s3://images/shards" if "S3" in reader else str(root / "shards")
    cache = tempfile.mkdtemp(dir=root)
    dataset = (
        ImageFolder("train", SHAPE, CLASSES, str(root / "images"))
        if reader == "image_folder"
        else Shards("train", root=where, cache_dir=cache, window=WINDOW, remote_options=options, cache_gb=0.2)
    )
    source = Source.of(dataset)
    if "not ahead" in reader:
        source.copy_ahead = lambda indices: None  # type: ignore[method-assign]
    sampler = Sampler(len(dataset), BATCH, seed=seed)
    loader = Loader(source, sampler, torch.float32, torch.device("cpu"), num_workers=workers)
    return (step.num_samples for step in loader.steps(0))


def measure(reader: str, root: Path, port: str, workers: int, seed: int, compute_us: float) -> None:
    """Print the samples per second of an epoch, and the most memory, MiB."""
    torch.set_num_threads(1)
    memory, has_ended = [0.0], threading.Event()

    def watch() -> None:
        while not has_ended.wait(0.2):
            memory.append(sum(map(_pss_mib, _tree(os.getpid()))))

    threading.Thread(target=watch, daemon=True).start()
    start, count = time.perf_counter(), 0
    for size in batches(reader, root, port, workers, seed):
        count += size
        time.sleep(size * compute_us / 1e6)
    print(json.dumps([count / (time.perf_counter() - start), max(memory)]), flush=True)
    has_ended.set()
    os._exit(0)  # without waiting for the workers of litData


def _tree(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has exited
        return []
    return [pid, *(each for child in children for each in _tree(int(child)))]


def _pss_mib(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/smaps_rollup").read_text().split("Pss:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        return 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("images", 20_000), ("rounds", 3), ("workers", 2), ("compute-us", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="|".join(READERS), help="readers, separated by |")
    parser.add_argument("--root", help="a directory that keeps the images")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ |= CREDENTIALS
    if args.measure:
        reader, port, seed = args.measure
        measure(reader, Path(args.root), port, args.workers, int(seed), args.compute_us)
    missing = [name for name in ("WebDataset", "litData") if find_spec(name.lower()) is None]
    readers = [name for name in args.only.split("|") if name not in missing]
    with tempfile.TemporaryDirectory() as name:
        root = Path(args.root or name)
        if not (root / "shards").exists():
            save(root, args.images)
        pipe: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        server = subprocess.Popen([sys.executable, "-W", "ignore", "-c", SERVER, str(LATENCY_S)], **pipe)
        port = server.stdout.readline().strip()  # type: ignore[union-attr]
        subprocess.run([sys.executable, "-c", UPLOAD, f"http://127.0.0.1:{port}", str(root / "shards")], check=True)
        found: dict[str, list[list[float]]] = {reader: [] for reader in readers}
        for number in range(args.rounds):
            for reader in readers:
                _ask(server)
                command = [sys.executable, "-W", "ignore", __file__, "--root", str(root), "--measure", reader, port]
                options = [str(number), f"--workers={args.workers}", f"--compute-us={args.compute_us}"]
                done = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True, check=True)
                found[reader].append([*json.loads(done.stdout.splitlines()[-1]), *_ask(server)])
                print(reader, *found[reader][-1], file=sys.stderr, flush=True)
        server.communicate()
    print(f"{args.images} images, {args.workers} workers, {args.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    print("| reader | best, samples/s | median, samples/s | requests per epoch | downloaded, MB | memory, MiB |")
    print("|---|---|---|---|---|---|")
    for reader, rows in found.items():
        rates, memory, requests, num_bytes = zip(*rows, strict=True)
        texts = (max(rates), statistics.median(rates), max(requests), max(num_bytes) / 1e6, max(memory))
        print(f"| {reader} | {' | '.join(f'{value:,.0f}' for value in texts)} |")


def _ask(server: Any) -> list[int]:
    """Return the numbers of requests and bytes since the last call."""
    server.stdin.write("\n")
    server.stdin.flush()
    return list(json.loads(server.stdout.readline()))


if __name__ == "__main__":
    main()
