"""The code that a job runs: which files it is made of, and which of them are others than when it was submitted."""

import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import runner
from runner.runs.strict_json import dumps

INSTALLED, OWN, IMPORTED = "installed", "own", "imported"  # parts of a copy: the runner, --config-dir, anything else
FACTS = "code.json"
SUFFIXES = (".py", ".yaml", ".yml")  # of files that are code; a frozen job has the others beside them too
OF_RUNNER = (*SUFFIXES, ".typed")
OF_OTHERS = ("site-packages", "dist-packages")  # folders of what is installed
# What the folder of a run, a sweep, a copy of code or an environment has in it, which are none of the user's own code.
NO_CODE = ("overrides.yaml", "ledger.jsonl", FACTS, "pyvenv.cfg")


@dataclass(frozen=True)
class CodeState:
    """The code as it was at a time, by hashes."""

    at: str  # the time, as 2026-11-22T02:30:00
    git: dict[str, Any]  # as runner.runs.provenance.git_state
    places: dict[str, str]  # of the user's own folders and files: the place in a copy, and where each is
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 by place, of code alone

    @property
    def sha256(self) -> str:
        return hashlib.sha256(dumps(self.files, sort_keys=True).encode()).hexdigest()

    def changed(self) -> list[str]:
        """The files that are others now, or no longer there, or new."""
        now = hashes({**places_of_runner(), **{place: Path(path) for place, path in self.places.items()}})
        return [self._shown(name) for name in sorted({*now, *self.files}) if now.get(name) != self.files.get(name)]

    def _shown(self, name: str) -> str:
        """Where the user knows the file."""
        for place, path in self.places.items():
            if f"{name}/".startswith(f"{place}/"):
                file = Path(path + name.removeprefix(place))
                return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)
        return name.removeprefix(f"{INSTALLED}/")


def read_state(path: Path) -> CodeState:
    """Raises OSError, ValueError or TypeError where there is none."""
    return CodeState(**json.loads(path.read_text()))


def copy_that_runs() -> Path | None:
    """The copy that this process runs the runner's code of, which a job was submitted with."""
    folder = runner.ROOT.parent
    return folder if runner.ROOT.name == INSTALLED and (folder / FACTS).is_file() else None


def where_it_was(config_dir: str) -> str:
    """The user's own folder that was copied, where this one is in the copy; otherwise the same."""
    folder = copy_that_runs()
    if folder is None or not Path(config_dir).is_relative_to(folder):
        return config_dir
    return read_state(folder / FACTS).places.get(Path(config_dir).relative_to(folder).as_posix(), config_dir)


def facts_of_job(submitted: CodeState | None) -> dict[str, Any] | None:
    """What result.json says of the code of this process, where it is a job that was submitted before.

    submitted: the state then, of a job that runs what there is when it starts.
    """
    folder = copy_that_runs()
    state = read_state(folder / FACTS) if folder else submitted
    if state is None:
        return None
    facts = {"code": "frozen" if folder else "live", "submitted": state.at, "sha256": state.sha256}
    return facts | {"changed": [] if folder else state.changed()}


def told(facts: Mapping[str, Any]) -> str | None:
    """A line for the head of the run's log; None where the code is what it was, and is kept nowhere."""
    if facts["code"] == "frozen":
        return f"code     as of {facts['submitted']}, kept in {copy_that_runs()}"
    if not facts["changed"]:
        return None
    return f"the code is another than when this was submitted, {facts['submitted']}: {listed(facts['changed'])}"


def listed(files: Sequence[str]) -> str:
    """The first five by name."""
    return ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")


def to_json(state: CodeState) -> str:
    return dumps(asdict(state), indent=1) + "\n"


def hashes(places: Mapping[str, Path]) -> dict[str, str]:
    """Of the code in these places."""
    return {
        name: hashlib.sha256(file.read_bytes()).hexdigest()
        for place, source in places.items()
        for name, file in files_of(place, source)
        if file.suffix in SUFFIXES and not file.is_symlink()
    }


def places_of_runner() -> dict[str, Path]:
    """Its packages, in a checkout or where they are installed."""
    package = Path(runner.__file__).resolve().parent
    parts = {"runner": package, "hydra_plugins/runner": package.parent / "hydra_plugins" / "runner"}
    parts |= {name: runner.ROOT / name for name in ("conf", "models", "data")}
    return {f"{INSTALLED}/{name}": path for name, path in parts.items()}


def places_of_own(config_dirs: Iterable[str], taken: int = 0) -> dict[str, Path]:
    """The user's own folders; taken: numbers that others have."""
    names = [(folder, re.sub(r"[^A-Za-z0-9._-]+", ".", Path(folder).name)) for folder in config_dirs]
    return {f"{OWN}/{number}-{name}": Path(folder) for number, (folder, name) in enumerate(names, start=taken)}


def places_of_imported(config_dirs: Iterable[str]) -> dict[str, Path]:
    """Modules and packages that this process has imported from elsewhere, and that no package manager has installed.

    They are those that the configuration names, which was checked by importing them, and what these import.
    """
    own, parts = [Path(folder) for folder in config_dirs], list(places_of_runner().values())
    libraries = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
    modules = [*sys.modules.items(), *((module.__name__, module) for module in runner._others.values())]
    found: dict[str, Path] = {}
    for name, module in modules:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name in ("__main__", "__mp_main__") or file.startswith(libraries):
            continue
        path = Path(file).absolute()
        depth = name.count(".") + (path.stem == "__init__")
        top = path.parents[depth - 1] if depth else path  # the folder of the package, or the module's own file
        # One that is a folder of --config-dir may be imported as a package besides.
        known = any(folder in top.parents for folder in own) or any(part in (top, *top.parents) for part in parts)
        if known or any(part in OF_OTHERS for part in path.parts) or not top.exists():
            continue
        if top.name.partition(".")[0] == name.partition(".")[0]:
            found.setdefault(f"{IMPORTED}/{top.name}", top)
    return found


def files_of(place: str, source: Path) -> Iterator[tuple[str, Path]]:
    """The files there, each with its place; links to folders too, which are not entered.

    Of the runner those that it is made of. Nothing of hidden folders, of runs, of environments and of Python's caches.
    """
    if source.is_file():
        yield place, source
        return
    of_runner = place.startswith(f"{INSTALLED}/")
    for folder, folders, names in os.walk(source):
        here = Path(folder)
        if here != source and any(name in names for name in NO_CODE):
            folders.clear()
            continue
        links = [name for name in folders if (here / name).is_symlink()]
        folders[:] = sorted(name for name in folders if name not in links and not _skipped(name))
        for name in sorted([*names, *links]):
            file = here / name
            if name.startswith(".") or (of_runner and file.suffix not in OF_RUNNER):
                continue
            if file.is_file() or name in links:
                yield f"{place}/{file.relative_to(source)}", file


def _skipped(folder: str) -> bool:
    return folder.startswith(".") or folder in ("__pycache__", "_shipped")
