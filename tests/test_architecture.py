"""The plan of the house: its floors, and that every import goes to a floor below or stays in its folder."""

import ast
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

from runner import ROOT

# Top floor first. What stands on one line stands beside each other: neither imports the other.
FLOORS = (
    ("runner/__main__.py",),
    ("runner/main.py", "runner/api"),  # argv to an exit status; calls from Python to runs and exceptions
    ("runner/command.py",),  # what was typed to one checked configuration
    ("runner/tasks",),  # one file per task; nobody imports them
    ("runner/sweeps",),  # which jobs, in which order, what came of them
    ("runner/launchers",),  # how processes come to be
    ("runner/fault_tolerance", "runner/parallel"),  # what outlasts a crash, and the ways of spreading a model
    ("runner/training",),  # the loop, the batch, the loss, and the contracts of strategy and callback
    ("runner/config",),  # what was typed, composed, checked and made into objects
    ("runner/runs", "runner/distributed"),  # what is on disk, and who this process is among the ranks
    ("runner/errors.py",),
    ("runner/__init__.py",),
)
APART = ("models", "data")  # no import ties them to the rest
PLUGINS = "hydra_plugins/runner"  # found by Hydra; they import sweeps/ only when asked

HYDRA = ("hydra", "omegaconf", "hydra_plugins")
MAY_IMPORT_HYDRA = ("runner/main.py", "runner/command.py", "runner/config/", "runner/sweeps/", "hydra_plugins/")
MAY_READ_ENVIRONMENT = ("runner/distributed/", "runner/launchers/", "runner/sweeps/slot_process.py")
MAX_LINES, MAX_LINES_OF_THE_LOOP = 300, 250
VAGUE = ("utils", "helpers", "misc", "common", "manager", "registry")

Sources = Mapping[str, str]  # text by path
Arrows = set[tuple[str, str]]  # from file to file


def read_sources(*folders: str) -> dict[str, str]:
    found = {str(path.relative_to(ROOT)): path for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert found
    return {name: path.read_text() for name, path in sorted(found.items())}


SOURCES = read_sources("runner", *APART, "hydra_plugins")


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@cache
def imports(text: str) -> frozenset[str]:
    """The modules that a file imports, inside of functions too: of `from a import b`, a and a.b.

    Not those that it names for type checkers alone.
    """
    found: set[str] = set()
    tree = ast.parse(text)
    for_types = {inner for node in ast.walk(tree) if is_for_types(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"line {node.lineno} imports relatively"
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return frozenset(found)


def module_of(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def arrows_of(sources: Sources) -> Arrows:
    """Who imports whom among the files; `from package import module` is an arrow to the module alone."""
    files = {module_of(name): name for name in sources}
    arrows = set()
    for name, text in sources.items():
        found = {module for module in imports(text) if module in files}
        for module in found:
            inner = any(other.startswith(f"{module}.") for other in found)
            if files[module] != name and not (inner and files[module].endswith("__init__.py")):
                arrows.add((name, files[module]))
    return arrows


def floor_of(name: str) -> tuple[int, str] | None:
    """The floor, counted from the top, and the room on it; None for what stands apart."""
    for number, rooms in enumerate(FLOORS):
        for room in rooms:
            if name == room or name.startswith(f"{room}/"):
                return number, room
    return None


def wrong_arrows(arrows: Arrows) -> list[str]:
    """Those that go to a floor above, or to another room of the same one."""
    wrong = []
    for source, target in sorted(arrows):
        start, end = floor_of(source), floor_of(target)
        if start is None or end is None:
            continue
        if start[1] != end[1] and start[0] >= end[0]:
            wrong.append(f"{source} imports {target}, which is not below it")
    return wrong


def circles(arrows: Arrows) -> list[list[str]]:
    """A way round for every circle of files that a walk along the arrows meets."""
    targets: dict[str, list[str]] = {}
    for source, target in sorted(arrows):
        targets.setdefault(source, []).append(target)
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> None:
        if name in way:
            found.append([*way[way.index(name) :], name])
        elif name not in done:
            for target in targets.get(name, ()):
                walk(target, [*way, name])
            done.add(name)

    for name in targets:
        walk(name, [])
    return found


def importers(names: Iterable[str], *modules: str) -> list[str]:
    """Those of the files that import one of the modules, or what is in it."""
    return [
        name
        for name in names
        if any(f"{found}.".startswith(f"{module}.") for found in imports(SOURCES[name]) for module in modules)
    ]


def of(*folders: str) -> list[str]:
    return [name for name in SOURCES if name.startswith(tuple(f"{folder}/" for folder in folders))]


def test_every_file_of_the_runner_has_a_room() -> None:
    assert [name for name in of("runner") if floor_of(name) is None] == []
    entries = {name.split("/")[1] for name in of("runner")}
    assert len(entries - {"__init__.py"}) <= 14
    files = {entry for entry in entries if entry.endswith(".py")}
    assert files == {"__init__.py", "__main__.py", "main.py", "command.py", "errors.py"}


def test_every_import_goes_down() -> None:
    assert wrong_arrows(arrows_of(SOURCES)) == []
    assert importers(of("runner/sweeps", "runner/launchers", "runner/parallel"), "runner.tasks") == []


def test_there_is_no_circle() -> None:
    assert circles(arrows_of(SOURCES)) == []


def test_any_arrow_that_is_turned_round_is_found() -> None:
    arrows = arrows_of(SOURCES)
    for source, target in arrows:
        turned = (arrows - {(source, target)}) | {(target, source)}
        start, end = floor_of(source), floor_of(target)
        if start and end and start[1] != end[1]:
            assert f"{target} imports {source}, which is not below it" in wrong_arrows(turned)
        both = circles(arrows | {(target, source)})
        assert any({source, target} <= set(way) for way in both), (source, target)


def between_rooms() -> list[tuple[str, str]]:
    """One arrow of each pair of rooms, and one within each room."""
    chosen: dict[tuple[str, str], tuple[str, str]] = {}
    for source, target in sorted(arrows_of(SOURCES)):
        start, end = floor_of(source), floor_of(target)
        if start and end:
            chosen.setdefault((start[1], end[1]), (source, target))
    return list(chosen.values())


@pytest.mark.parametrize(("source", "target"), between_rooms(), ids=lambda name: name.removeprefix("runner/"))
def test_an_arrow_that_is_turned_round_is_found(source: str, target: str) -> None:
    """Written into the file at the arrow's end, at its top and inside of a function."""
    for line in (f"import {module_of(source)}\n", f"def lazily():\n    from {module_of(source)} import anything\n"):
        turned = arrows_of({**SOURCES, target: SOURCES[target] + "\n" + line})
        assert (target, source) in turned
        if floor_of(source)[1] != floor_of(target)[1]:  # type: ignore[index]
            assert wrong_arrows(turned) == [f"{target} imports {source}, which is not below it"]
        assert any({source, target} <= set(way) for way in circles(turned))


def test_models_and_data_know_neither_the_runner_nor_distribution() -> None:
    assert importers(of(*APART), "runner", "conf", *HYDRA, "torch.distributed") == []
    assert importers(of("models"), "data") == []
    assert importers(of("data"), "models") == []


def test_the_runner_knows_no_model_and_no_data() -> None:
    assert importers(of("runner", "hydra_plugins"), *APART, "conf") == []


def test_hydra_lives_where_configuration_is_composed() -> None:
    found = importers(SOURCES, *HYDRA)
    assert [name for name in found if not name.startswith(MAY_IMPORT_HYDRA)] == []
    assert all(any(name.startswith(room) for name in found) for room in MAY_IMPORT_HYDRA)  # none is there in vain


def test_the_environment_is_read_where_processes_come_to_be() -> None:
    def reads(name: str) -> bool:
        attributes = {node.attr for node in ast.walk(ast.parse(SOURCES[name])) if isinstance(node, ast.Attribute)}
        return bool(
            {"environ", "getenv"} & (attributes | {found.rpartition(".")[2] for found in imports(SOURCES[name])})
        )

    found = [name for name in SOURCES if reads(name)]
    assert [name for name in found if not name.startswith(MAY_READ_ENVIRONMENT)] == []
    assert all(any(name.startswith(room) for name in found) for room in MAY_READ_ENVIRONMENT)


def test_what_every_command_imports_is_light() -> None:
    """Hydra imports its plugins for each of them, completion too."""
    light = [*of("hydra_plugins", "runner/config"), "runner/main.py", "runner/command.py", "runner/errors.py"]
    assert importers(light, "torch", "torchvision", "numpy", "optuna") == []
    for name in ("runner/main.py", "runner/command.py"):
        at_import = [node for node in ast.parse(SOURCES[name]).body if isinstance(node, ast.ImportFrom)]
        assert not {node.module for node in at_import} & {"runner.launchers.launch", "runner.sweeps.start"}
    for name in of(PLUGINS):
        top = [node for node in ast.parse(SOURCES[name]).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert not [node for node in top if "runner" in ast.unparse(node)], name
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()  # other projects have plugins there too


def test_the_loop_does_not_ask_for_the_mode() -> None:
    modes = {path.stem for path in (ROOT / "conf" / "parallel").glob("*.yaml")}
    for name in (*of("runner/training"), "runner/tasks/train.py", "runner/tasks/evaluate.py"):
        assert importers([name], "runner.parallel") == []
    for name in ("runner/training/trainer.py", "runner/training/evaluation.py", "runner/tasks/train.py"):
        words = {node.value for node in ast.walk(ast.parse(SOURCES[name])) if isinstance(node, ast.Constant)}
        assert not modes & words, name


def test_nobody_asks_whether_a_member_is_there() -> None:
    """What a contract asks for is declared; only a model may offer stages, a tensor plan and places, or not."""
    asking = re.compile(r"getattr\((?:parallel|task|launcher|callback|spread|strategy)\b")
    assert [name for name, text in SOURCES.items() if asking.search(text)] == []


def test_no_file_is_long_or_named_for_nothing_in_particular() -> None:
    lengths = {name: len(text.splitlines()) for name, text in SOURCES.items()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
    assert lengths["runner/training/trainer.py"] <= MAX_LINES_OF_THE_LOOP
    assert [name for name in lengths if Path(name).stem in VAGUE] == []
