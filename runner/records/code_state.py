"""The code that a job runs: its files with their hashes, and those that have changed since the job was submitted."""

import fnmatch
import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import runner
from runner.errors import PACKAGE_DIRECTORIES
from runner.paths import ROOT
from runner.records.record_files import dumps

# The directories of an archive: the runner, the directories of --config-dir, and other imported modules.
INSTALLED, CUSTOM, IMPORTED = "installed", "own", "imported"
ARCHIVE, STATE = "code-*.tar", "code.json"  # the archive, and the file in it that describes the code
CODE_SUFFIXES = (".py", ".yaml", ".yml")
RUNNER_SUFFIXES = (*CODE_SUFFIXES, ".typed")
# Files that identify a run, a sweep, extracted code or a virtual environment, none of which is custom code.
NO_CODE = ("overrides.yaml", "ledger.jsonl", STATE, "pyvenv.cfg")


@dataclass(frozen=True)
class CodeState:
    """The state of the code at a time. An archive path is the path of a file or directory in an archive of the code."""

    at: str  # the time, as 2026-11-22T02:30:00
    git: dict[str, Any]  # see runner.records.provenance.git_state
    places: dict[str, str]  # custom directories and imported modules by archive path
    files: dict[str, str] = field(default_factory=dict)  # the SHA-256 of code files by archive path

    def sources(self) -> dict[str, Path]:
        """Return the files and directories of the code by archive path, including the runner's packages."""
        package = Path(runner.__file__).resolve().parent
        sources = {"runner": package, "hydra_plugins/runner": package.parent / "hydra_plugins" / "runner"}
        sources |= {name: ROOT / name for name in ("conf", "models", "data")}
        own = {f"{INSTALLED}/{name}": path for name, path in sources.items()}
        return own | {archive_path: Path(path) for archive_path, path in self.places.items()}

    @property
    def sha256(self) -> str:
        return hashlib.sha256(dumps(self.files, sort_keys=True).encode()).hexdigest()

    def changed(self) -> list[str]:
        """Return the files that have been changed, removed or added since."""
        now = hash_files(self.sources())
        return [self._original(name) for name in sorted({*now, *self.files}) if now.get(name) != self.files.get(name)]

    def _original(self, name: str) -> str:
        """Return the path of a file outside of the archive, relative to the working directory if possible."""
        for archive_path, path in self.places.items():
            if f"{name}/".startswith(f"{archive_path}/"):
                file = Path(path + name.removeprefix(archive_path))
                return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)
        return name.removeprefix(f"{INSTALLED}/")


def to_json(state: CodeState) -> str:
    return dumps(asdict(state), indent=1) + "\n"


def read_state(path: Path) -> CodeState:
    """Return the state in a file. Raises OSError, ValueError or TypeError if it is missing or damaged."""
    return CodeState(**json.loads(path.read_text()))


def extracted_code() -> Path | None:
    """Return the directory into which a job has extracted the code that this process runs, or None."""
    directory = ROOT.parent
    return directory if ROOT.name == INSTALLED and (directory / STATE).is_file() else None


def original_directory(config_dir: str) -> str:
    """Return the directory of which `config_dir` is the extracted copy; `config_dir` itself if it is not a copy."""
    extracted = extracted_code()
    if extracted is None or not Path(config_dir).is_relative_to(extracted):
        return config_dir
    archive_path = Path(config_dir).relative_to(extracted).as_posix()
    return read_state(extracted / STATE).places.get(archive_path, config_dir)


def facts_of_job(submitted: CodeState | None) -> dict[str, Any] | None:
    """Return the facts for result.json about the code of a job that waited in a queue, and None for other processes.

    submitted: the state at submission, of a job that runs the code of the time of its start.
    """
    extracted = extracted_code()
    state = read_state(extracted / STATE) if extracted else submitted
    if state is None:
        return None
    facts = {"code": "frozen" if extracted else "live", "submitted": state.at, "sha256": state.sha256}
    return facts | {"changed": [] if extracted else state.changed()}


def describe_code(facts: Mapping[str, Any]) -> str | None:
    """Return a line about the code for the log of a run; None if a job runs the current code, which is unchanged."""
    if facts["code"] == "frozen":
        return f"code     as of {facts['submitted']}, when the job was submitted"
    if not facts["changed"]:
        return None
    return f"the code has changed since the job was submitted, {facts['submitted']}: {shorten(facts['changed'])}"


def shorten(files: Sequence[str]) -> str:
    """Return the first five names."""
    return ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")


def hash_files(sources: Mapping[str, Path]) -> dict[str, str]:
    """Return the SHA-256 of the code files in the sources, by archive path."""
    return {
        name: hashlib.sha256(file.read_bytes()).hexdigest()
        for archive_path, source in sources.items()
        for name, file in files_of(archive_path, source)
        if file.suffix in CODE_SUFFIXES and not file.is_symlink()
    }


def custom_sources(config_dirs: Sequence[str]) -> dict[str, Path]:
    """Return the directories of --config-dir, and other imported modules and packages, by archive path.

    The latter are those that no package manager has installed. The configuration names them, so that its validation has
    imported them, or they are imported by such modules.
    """
    directories = [Path(path) for path in config_dirs]
    names = [re.sub(r"[^A-Za-z0-9._-]+", ".", path.name) for path in directories]
    found = {f"{CUSTOM}/{n}-{name}": path for n, (name, path) in enumerate(zip(names, directories, strict=True))}
    own = [Path(runner.__file__).parent, *(ROOT / name for name in ("hydra_plugins", "models", "data"))]
    libraries = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name in ("__main__", "__mp_main__") or file.startswith(libraries):
            continue
        path = Path(file).absolute()
        depth = name.count(".") + (path.stem == "__init__")
        top = path.parents[depth - 1] if depth else path  # the directory of the package, or the module's file
        # A directory of --config-dir may be imported as a package in addition.
        is_included = any(path.is_relative_to(source) for source in own) or any(d in top.parents for d in directories)
        if is_included or any(part in PACKAGE_DIRECTORIES for part in path.parts) or not top.exists():
            continue
        if top.name.partition(".")[0] == name.partition(".")[0]:
            found.setdefault(f"{IMPORTED}/{top.name}", top)
    return found


def files_of(archive_path: str, source: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a source with their archive paths, and links to directories, which are not followed.

    Hidden directories, runs, virtual environments and Python's caches are left out, and files of the runner other than
    code.
    """
    if source.is_file():
        yield archive_path, source
        return
    is_runner = archive_path.startswith(f"{INSTALLED}/")
    for path, directories, names in os.walk(source):
        here = Path(path)
        if here != source and (any(name in names for name in NO_CODE) or fnmatch.filter(names, ARCHIVE)):
            directories.clear()
            continue
        links = [name for name in directories if (here / name).is_symlink()]
        skipped = {*links, *fnmatch.filter(directories, ".*"), "__pycache__", "_shipped"}
        directories[:] = sorted(set(directories) - skipped)
        for name in sorted([*names, *links]):
            file = here / name
            if name.startswith(".") or (is_runner and file.suffix not in RUNNER_SUFFIXES):
                continue
            if file.is_file() or name in links:
                yield f"{archive_path}/{file.relative_to(source)}", file
