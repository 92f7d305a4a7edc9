"""Mutation testing: do the default tests notice a changed sign, a changed bound or a removed line?

usage: python tests/support/mutations.py [--seed 0] [--count 20] [--only NAME] [--list]

Each mutation changes one place of one file of runner/ in a copy of the repository, and no file is chosen twice. The
tests of the file's package run first and then the whole default tier, each until the first failure. Prints a row of
Markdown for each mutation: the place, the change, and the first test that fails, or ESCAPED.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 3600
BOUNDS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
SIGNS = {"+": "-", "-": "+"}
SYMBOLS = {
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="},
    **{ast.Add: "+", ast.Sub: "-"},
}
# Lines that only print, and lines that matter only on a machine that fails or in a race.
EXCLUDED = re.compile(
    r"^\s*(log\.|logging\.|print\(|warnings\.|\"\"\"|console\.|del |gc\.|assert )|fsync|timeout|_S\b|deadline"
)


@dataclass(frozen=True)
class Mutation:
    """A change of one place.

    Attributes:
        kind: sign, bound or removed line.
        line: The line number, counted from 1.
        start, end: The range of characters of the file's text that `text` replaces.
    """

    file: str
    kind: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def candidates(file: str, source: str) -> Iterator[Mutation]:
    """Yield every possible mutation of a file."""
    lines = source.splitlines(keepends=True)
    offsets = [sum(map(len, lines[:number])) for number in range(len(lines))]

    def offset(line: int, column: int) -> int:
        return offsets[line - 1] + len(lines[line - 1].encode()[:column].decode())

    for node in ast.walk(ast.parse(source)):
        if hasattr(node, "lineno") and EXCLUDED.search(lines[node.lineno - 1]):
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, operation, right, swaps, kind = node.left, node.ops[0], node.comparators[0], BOUNDS, "bound"
        elif isinstance(node, ast.BinOp) and not isinstance(node.left, (ast.JoinedStr, ast.List, ast.Tuple)):
            left, operation, right, swaps, kind = node.left, node.op, node.right, SIGNS, "sign"
        elif isinstance(node, (ast.Expr, ast.AugAssign)) and node.lineno == node.end_lineno:
            text = lines[node.lineno - 1]
            if text.strip() == ast.get_source_segment(source, node):
                indent = len(text) - len(text.lstrip())
                start = offset(node.lineno, indent)
                yield Mutation(file, "removed line", node.lineno, start, start + len(text.strip()), "pass")
            continue
        else:
            continue
        symbol = SYMBOLS.get(type(operation))
        start = offset(left.end_lineno or 0, left.end_col_offset or 0)
        end = offset(right.lineno, right.col_offset)
        between = source[start:end]
        if symbol and swaps.get(symbol) and between.count(symbol) == 1:
            at = start + between.index(symbol)
            yield Mutation(file, kind, node.lineno, at, at + len(symbol), swaps[symbol])


def choose(seed: int, count: int) -> list[Mutation]:
    """Return `count` mutations of different files, in a random order that depends only on the seed and the sources."""
    numbers = random.Random(seed)
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "runner").rglob("*.py"))
    numbers.shuffle(files)
    found = []
    for file in files:
        kind = numbers.choice(("sign", "bound", "removed line"))
        possible = list(candidates(file, (ROOT / file).read_text()))
        if chosen := [each for each in possible if each.kind == kind] or possible:
            found.append(numbers.choice(chosen))
        if len(found) == count:
            break
    return found


def first_failure(copy: Path, mutation: Mutation) -> str | None:
    """Return the first test that fails with the mutation; None if all tests pass."""
    target = copy / mutation.file
    source = target.read_text()
    target.write_text(mutation.apply(source))
    package = Path("tests", Path(mutation.file).parts[1])
    try:
        for tests in ([str(package)] if (copy / package).is_dir() else [], ["tests"]):
            if tests:
                command = [sys.executable, "-m", "pytest", "-x", "-q", *tests]
                env = {**os.environ, "PYTHONPATH": str(copy)}  # commands that the tests start import the copy too
                done = subprocess.run(
                    command, cwd=copy, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
                )
                if done.returncode != 0:
                    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                    return failed[1] if failed else f"status {done.returncode}"
    finally:
        target.write_text(source)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--only", help="test only mutations of files whose path contains this text")
    parser.add_argument("--list", action="store_true", help="print the mutations without running tests")
    arguments = parser.parse_args()
    escaped = 0
    print("| place | mutation | first failing test |", "|---|---|---|", sep="\n")
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "outputs", "__pycache__", ".*_cache"))
        (copy / "outputs").mkdir()
        for each in choose(arguments.seed, arguments.count):
            if arguments.only and arguments.only not in each.file:
                continue
            line = (ROOT / each.file).read_text().splitlines()[each.line - 1].strip().replace("|", "\\|")
            failed = "-" if arguments.list else first_failure(copy, each)
            escaped += failed is None
            print(f"| {each.file}:{each.line} | {each.kind}: `{line}` | {failed or 'ESCAPED'} |", flush=True)
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main())
