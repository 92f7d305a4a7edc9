"""A plugin with a server on loopback that answers as the XML API of Google Cloud Storage, for one bucket in memory.

Conditional writes compare the generation of an object, and not its e_tag.
Source: https://cloud.google.com/storage/docs/xml-api/reference-headers#xgoogifgenerationmatch
"""

import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

BUCKET = "google-bucket"
STARTED = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
TIME = "2026-01-01T00:00:00.000Z"


@pytest.fixture
def google_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start the server, name it in the environment that obstore reads, and return the address of the bucket."""
    objects: dict[str, tuple[int, bytes]] = {}  # generation and content, by key
    uploads: dict[str, dict[int, bytes]] = {}
    numbers, guard = itertools.count(1000), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
            _, bucket, key = [*unquote(url.path).split("/", 2), ""][:3]
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            assert bucket == BUCKET, self.path
            with guard:
                if "list-type" in query:
                    self.respond(200, listed(query.get("prefix", "")))
                elif "uploads" in query:
                    uploads[key] = {}
                    self.respond(200, STARTED)
                elif "partNumber" in query:
                    uploads[key][int(query["partNumber"])] = body
                    self.respond(200, ETag=f'"part-{query["partNumber"]}"')
                elif self.command == "PUT" or "uploadId" in query:
                    parts = uploads.pop(key, {})
                    self.write(key, b"".join(parts[number] for number in sorted(parts)) or body, is_whole=not parts)
                elif key not in objects:
                    self.respond(404)
                elif self.command == "DELETE":
                    del objects[key]
                    self.respond(204)
                else:
                    self.read(*objects[key])

        def write(self, key: str, content: bytes, is_whole: bool) -> None:
            expected = self.headers.get("x-goog-if-generation-match")
            if expected is not None and not expected.isdigit():
                self.respond(400, b"<Error><Code>InvalidArgument</Code></Error>")
            elif expected is not None and int(expected) != objects.get(key, (0, b""))[0]:
                self.respond(412)
            else:
                objects[key] = (next(numbers), content)
                generation = objects[key][0]
                tag = f'"tag-{generation}"'
                result = f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>".encode()
                self.respond(200, b"" if is_whole else result, **facts_of(generation))

        def read(self, generation: int, content: bytes) -> None:
            facts = {**facts_of(generation), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
            if (bounds := self.headers.get("Range")) is not None:
                first, last = (int(number) for number in bounds.removeprefix("bytes=").split("-"))
                last = min(last, len(content) - 1)
                facts["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                self.respond(206, content[first : last + 1], **facts)
            else:
                self.respond(200, content, **facts)

        def respond(self, status: int, content: bytes = b"", **headers: str) -> None:
            self.send_response_only(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    def facts_of(generation: int) -> dict[str, str]:
        return {"ETag": f'"tag-{generation}"', "x-goog-generation": str(generation)}

    def listed(prefix: str) -> bytes:
        entries = [
            f"<Contents><Key>{key}</Key><Size>{len(content)}</Size><LastModified>{TIME}</LastModified>"
            f'<ETag>"tag-{generation}"</ETag></Contents>'
            for key, (generation, content) in sorted(objects.items())
            if key.startswith(prefix)
        ]
        return f"<ListBucketResult>{''.join(entries)}</ListBucketResult>".encode()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    account = {"gcs_base_url": f"http://127.0.0.1:{server.server_address[1]}", "disable_oauth": True}
    unused = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    (tmp_path / "account.json").write_text(json.dumps(account | unused))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"gs://{BUCKET}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
