"""A plugin with an S3 server on loopback, and a proxy before it that injects faults."""

import http.client
import itertools
import os
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

STARTED_WITHIN_S = 120.0
BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@dataclass
class Bucket:
    """A new bucket of an S3 server on loopback."""

    port: int
    name: str

    def options(self, port: int | None = None, **others: Any) -> dict[str, Any]:
        """Return the options of obstore, with the port of a proxy if it is given."""
        return {"endpoint": f"http://127.0.0.1:{port or self.port}", "allow_http": True, "timeout": "5s", **others}

    def overrides(self, local_dir: Path, prefix: str = "runs", port: int | None = None) -> list[str]:
        """Return the overrides of a run that writes to the bucket."""
        endpoint = f"http://127.0.0.1:{port or self.port}"
        return [
            f"outputs=s3://{self.name}/{prefix}",
            f"remote.local_dir={local_dir}",
            f'remote.options={{endpoint:"{endpoint}",allow_http:true,timeout:"5s"}}',
        ]


@dataclass
class Proxy:
    """A proxy before a server. Assign `fault` to change how it handles the requests that follow.

    fault: called with the number of the request, from 1, its method and its path, before it is forwarded. It returns
    None to forward it, "busy" (status 503), "cut" (close the connection), "cut body" (forward it, and close the
    connection in the middle of the response), "unconditional" (forward it without conditions) or "denied" (403). It may
    sleep.
    """

    target: int
    fault: Callable[[int, str, str], str | None] = lambda number, method, path: None
    counts: Counter[str] = field(default_factory=Counter)  # of the outcomes, by method and outcome
    port: int = 0


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    """Start moto's server on a free port."""
    code = (
        "from moto.moto_server.threaded_moto_server import ThreadedMotoServer as Server\n"
        "server = Server('127.0.0.1', 0, verbose=False)\nserver.start()\n"
        "print(server.get_host_and_port()[1], flush=True)\ninput()"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    # The server exits when its standard input is closed, also if the tests are killed.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout and process.stdin
    timer = threading.Timer(STARTED_WITHIN_S, process.kill)
    timer.start()
    try:
        port = int(process.stdout.readline())
        timer.cancel()  # it limits only the start
        yield port
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()


@pytest.fixture
def bucket(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Create an empty bucket, and set the environment variables that obstore reads."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return create_bucket(s3_port, f"bucket-{uuid.uuid4().hex[:12]}")


def create_bucket(s3_port: int, name: str) -> Bucket:
    connection = http.client.HTTPConnection("127.0.0.1", s3_port, timeout=60)
    scope = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    connection.request("PUT", f"/{name}", headers={"Authorization": scope})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    connection.close()
    return Bucket(s3_port, name)


@pytest.fixture
def proxy(s3_port: int) -> Iterator[Proxy]:
    proxy, numbers = Proxy(s3_port), itertools.count(1)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            outcome = proxy.fault(next(numbers), self.command, self.path)
            proxy.counts[f"{self.command} {outcome}"] += 1
            if outcome == "cut":
                self.close_connection = True
            elif outcome == "busy":
                self.respond(503, {}, BUSY)
            elif outcome == "denied":
                self.respond(403, {}, b"<Error><Code>AccessDenied</Code></Error>")
            else:
                self.forward(body, outcome)

        def forward(self, body: bytes, outcome: str | None) -> None:
            dropped = {"host", "connection", *(("if-none-match", "if-match") if outcome == "unconditional" else ())}
            headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
            connection = http.client.HTTPConnection("127.0.0.1", proxy.target, timeout=60)
            try:
                connection.request(self.command, self.path, body, headers)
                response = connection.getresponse()
                content = response.read()
            finally:
                connection.close()
            kept = {name: value for name, value in response.getheaders() if name.lower() in ("etag", "content-range")}
            kept |= {name: value for name, value in response.getheaders() if name.lower().startswith("last-modified")}
            if self.command == "HEAD":
                kept["Content-Length"] = response.getheader("Content-Length") or "0"
            self.respond(response.status, kept, content, is_cut=outcome == "cut body")

        def respond(self, status: int, headers: dict[str, str], content: bytes, is_cut: bool = False) -> None:
            self.send_response_only(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if is_cut else content)
            self.close_connection |= is_cut

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore clients that have closed the connection."""

    server = Server(("127.0.0.1", 0), Handler)
    proxy.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def wait_until(condition: Callable[[], object], timeout_s: float = 120) -> None:
    """Wait until the condition is true. Fail the test after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no success within {timeout_s} s"
        time.sleep(0.05)


def remove_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the credentials from the environment."""
    for name in (*CREDENTIALS, *(name for name in os.environ if name.startswith("AWS_"))):
        monkeypatch.delenv(name, raising=False)
