"""A program that sends one request to an object store. Standard input contains the request as JSON.

A process of its own, because obstore hangs in a process that was forked after its parent had used it, as the workers of
a loader are. The program writes the answer to standard output, or a line to standard error with status 1.
"""

import json
import sys
from datetime import timedelta
from typing import Any

CLIENT = ("allow_http", "allow_invalid_certificates", "connect_timeout", "proxy_url", "timeout", "user_agent")
RETRIES = {"max_retries": 6, "retry_timeout": timedelta(seconds=40)}
MISSING = "it needs obstore; pip install 'experiment-runner[remote]'"


def main() -> None:
    """Answer a list of [path, size, e_tag] for a request without a path, or else a range of the bytes of an object."""
    request: dict[str, Any] = json.load(sys.stdin)
    try:
        import obstore
        from obstore.store import from_url
    except ImportError:
        sys.exit(MISSING)
    options = {name: value for name, value in request["options"].items() if value is not None}
    client = {name: options.pop(name) for name in CLIENT if name in options}
    settings = {**options, "retry_config": RETRIES}
    if client:  # an empty mapping would hide the environment, such as AWS_ALLOW_HTTP
        settings["client_options"] = client
    try:
        store: Any = from_url(address := request["address"], **({} if address.startswith("file:") else settings))
        if "path" not in request:
            found = [entry for page in obstore.list(store) for entry in page]
            json.dump([[entry["path"], entry["size"], entry["e_tag"] or ""] for entry in found], sys.stdout)
        else:
            start, end = request["range"]
            sys.stdout.buffer.write(obstore.get_range(store, request["path"], start=start, end=end))
    except Exception as error:  # obstore has one class per kind of store and failure
        text = " ".join(str(error).split())[:300] or type(error).__name__
        if "169.254.169.254" in text or "metadata" in text:  # the address at which machines of a cloud find credentials
            text = "there are no credentials; set them in the environment, such as AWS_ACCESS_KEY_ID"
        sys.exit(text)


if __name__ == "__main__":
    main()
