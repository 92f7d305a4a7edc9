"""Files of tokens: several writers at once, and a writer that was killed."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from runner.shipped.data.tokens import MappedTokens, cached_tokens

pytest.importorskip("transformers", reason="needs the extra hf")


def test_one_of_several_readers_computes_the_tokens(tmp_path: Path) -> None:
    source, computed, found = tmp_path / "a.txt", list[int](), list[MappedTokens]()
    source.write_text("text")
    starts = threading.Barrier(4, timeout=60)

    def compute() -> Iterator[np.ndarray]:
        computed.append(1)
        yield np.arange(1000)

    def read() -> None:
        starts.wait()
        found.append(cached_tokens(str(tmp_path / "cache"), [source], "", "uint16", compute()))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert computed == [1] and [tokens[:].tolist() for tokens in found] == [[*range(1000)]] * 4


def test_an_incomplete_file_of_a_killed_or_failed_writer_is_replaced(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("text")

    def fail() -> Iterator[np.ndarray]:
        yield np.arange(5)
        raise ValueError("line 2 is not JSON")

    with pytest.raises(ValueError, match="line 2 is not JSON"):
        cached_tokens(str(tmp_path), [source], "", "uint16", fail())
    (lock,) = tmp_path.glob("*.lock")
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", lock.name}
    lock.with_suffix(".partial").write_bytes(bytes(7))
    assert cached_tokens(str(tmp_path), [source], "", "uint16", iter([np.arange(3)]))[:].tolist() == [0, 1, 2]
    source.write_text("other text")
    assert cached_tokens(str(tmp_path), [source], "", "uint16", iter([np.arange(4)]))[:].tolist() == [0, 1, 2, 3]
