"""The layers of the code: which package may import which, and the rules that hold for every file."""

import ast
import itertools
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from runner.paths import ROOT

# From top to bottom. A file imports from layers below its own, or from its own package.
LAYERS = (
    "runner/__main__.py",
    "runner/cli.py",
    "runner/api",
    "runner/tasks",
    "runner/sweeps",
    "runner/launchers",
    "runner/jobs",
    "runner/planning",
    "runner/parallel",
    "runner/training",
    "runner/objectives",
    "runner/optimization",
    "runner/input",
    "runner/config",
    "runner/checkpoints",
    "runner/records",
    "runner/remote",
    "runner/distributed",
    "runner/errors.py",
    "runner/process",
    "runner/tensor_values.py",
    "runner/shipped.py",
    "runner/paths.py",
)
LAZY = "runner/__init__.py"  # offers names of the packages, each imported when it is used
INDEPENDENT = ("models", "data")

HYDRA = ("hydra", "omegaconf", "hydra_plugins")
MAY_IMPORT_HYDRA = ("runner/cli.py", "runner/config/", "runner/sweeps/", "hydra_plugins/")
MAY_READ_ENVIRONMENT = (
    "runner/cli.py",  # the line that a shell completes
    "runner/__main__.py",
    "runner/distributed/",
    "runner/jobs/",
    "runner/launchers/",
    "runner/records/code_copy.py",  # the copy of the code that a job of a queue runs
)
MAX_LINES, MAX_LINES_OF_THE_LOOP, MAX_LINES_OF_A_FUNCTION, MAX_FILES = 400, 250, 60, 25
VAGUE_NAMES = ("utils", "helpers", "misc", "common", "manager", "registry")

Sources = Mapping[str, str]  # text by path
Imports = set[tuple[str, str]]  # (importing file, imported file)


def read_sources(*folders: str) -> dict[str, str]:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert paths
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(paths)}


SOURCES = read_sources("runner", *INDEPENDENT, "hydra_plugins")


@cache
def imported_modules(text: str) -> frozenset[str]:
    """Return the modules that a file imports anywhere, also in functions and under TYPE_CHECKING.

    For `from a import b` these are `a` and `a.b`.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return frozenset(found)


def module_of(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def file_imports(sources: Sources) -> Imports:
    """Return the pairs of files of which the first imports the second."""
    files = {module_of(name): name for name in sources}
    pairs = set()
    for name, text in sources.items():
        found = {module for module in imported_modules(text) if module in files}
        for module in found:
            is_only_parent = any(other.startswith(f"{module}.") for other in found)
            if files[module] != name and not (is_only_parent and files[module].endswith("__init__.py")):
                pairs.add((name, files[module]))
    return pairs


def layer_of(name: str) -> int | None:
    """Return the index of the file's layer, from the top; None for a file outside of the layers."""
    return next((i for i, layer in enumerate(LAYERS) if name == layer or name.startswith(f"{layer}/")), None)


def upward_imports(pairs: Imports) -> list[str]:
    found = []
    for source, target in sorted(pairs):
        above, below = layer_of(source), layer_of(target)
        if above is not None and below is not None and above > below:
            found.append(f"{source} imports {target}, which is in a layer above")
    return found


def cycles(pairs: Imports) -> list[list[str]]:
    """Return the files of each import cycle that a depth-first search meets."""
    targets: dict[str, list[str]] = {}
    for source, target in sorted(pairs):
        targets.setdefault(source, []).append(target)
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for target in targets.get(name, ()):
                visit(target, [*path, name])
            done.add(name)

    for name in targets:
        visit(name, [])
    return found


def importers(names: Iterable[str], *modules: str) -> list[str]:
    """Return the files that import one of the modules or something in it."""
    return [
        name
        for name in names
        if any(f"{found}.".startswith(f"{module}.") for found in imported_modules(SOURCES[name]) for module in modules)
    ]


def files_in(*folders: str) -> list[str]:
    return [name for name in SOURCES if name.startswith(tuple(f"{folder}/" for folder in folders))]


def test_every_file_of_the_runner_belongs_to_a_layer() -> None:
    assert [name for name in files_in("runner") if layer_of(name) is None] == [LAZY]


def test_every_import_goes_to_a_layer_below() -> None:
    assert upward_imports(file_imports(SOURCES)) == []
    assert importers(files_in("runner"), "runner.tasks") == importers(files_in("runner/tasks"), "runner.tasks")


def test_no_import_cycle_exists() -> None:
    assert cycles({pair for pair in file_imports(SOURCES) if LAZY not in pair}) == []


def layer_pairs(pairs: Imports) -> list[tuple[str, str]]:
    """Return one import for each pair of layers that has any."""
    chosen: dict[tuple[int, int], tuple[str, str]] = {}
    for source, target in sorted(pairs):
        above, below = layer_of(source), layer_of(target)
        if above is not None and below is not None and above != below:
            chosen.setdefault((above, below), (source, target))
    return list(chosen.values())


def test_reversed_imports_are_detected() -> None:
    """One for each pair of layers, in each form that an import may have."""
    forms = itertools.cycle(("import {}", "def f():\n    from {} import x", "if TYPE_CHECKING:\n    import {}"))
    pairs = file_imports(SOURCES)
    for (source, target), form in zip(layer_pairs(pairs), forms, strict=False):
        changed = {source: SOURCES[source], target: f"{SOURCES[target]}\n{form.format(module_of(source))}\n"}
        found = file_imports(changed)
        assert f"{target} imports {source}, which is in a layer above" in upward_imports(found)
        assert cycles(pairs | found)


def test_models_and_data_depend_neither_on_the_runner_nor_on_distribution() -> None:
    assert importers(files_in(*INDEPENDENT), "runner", "conf", *HYDRA, "torch.distributed") == []
    assert importers(files_in("models"), "data") == importers(files_in("data"), "models") == []


def test_the_runner_imports_neither_models_nor_data() -> None:
    assert importers(files_in("runner", "hydra_plugins"), *INDEPENDENT, "conf") == []


def test_hydra_is_imported_only_where_configuration_is_composed() -> None:
    found = importers(SOURCES, *HYDRA)
    assert [name for name in found if not name.startswith(MAY_IMPORT_HYDRA)] == []
    assert all(any(name.startswith(allowed) for name in found) for allowed in MAY_IMPORT_HYDRA)


def test_the_environment_is_read_only_where_processes_start() -> None:
    def reads(name: str) -> bool:
        attributes = {node.attr for node in ast.walk(ast.parse(SOURCES[name])) if isinstance(node, ast.Attribute)}
        imported = {found.rpartition(".")[2] for found in imported_modules(SOURCES[name])}
        return bool({"environ", "getenv"} & (attributes | imported))

    found = [name for name in SOURCES if reads(name)]
    assert [name for name in found if not name.startswith(MAY_READ_ENVIRONMENT)] == []
    assert all(any(name.startswith(allowed) for name in found) for allowed in MAY_READ_ENVIRONMENT)


def test_modules_that_every_command_imports_are_light() -> None:
    """Hydra imports its plugins for every command, also for completion."""
    light = [*files_in("hydra_plugins", "runner/config"), "runner/cli.py", "runner/errors.py", "runner/paths.py"]
    assert importers(light, "torch", "torchvision", "numpy", "optuna") == []
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()  # a namespace package that other projects share


def test_the_loop_names_no_mode() -> None:
    modes = {path.stem for path in (ROOT / "conf" / "parallel").glob("*.yaml")}
    assert importers([*files_in("runner/training"), "runner/tasks/train.py"], "runner.parallel") == []
    for name in ("runner/training/trainer.py", "runner/training/evaluation.py", "runner/tasks/train.py"):
        words = {node.value for node in ast.walk(ast.parse(SOURCES[name])) if isinstance(node, ast.Constant)}
        assert not modes & words, name


def test_members_of_contracts_are_declared() -> None:
    """Only models may lack members that the runner looks for: stages, a tensor plan and places."""
    asking = re.compile(r"getattr\((?:parallel|task|launcher|callback|spread|strategy)\b")
    assert [name for name, text in SOURCES.items() if asking.search(text)] == []


def test_files_and_folders_are_small_and_have_telling_names() -> None:
    lengths = {name: len(text.splitlines()) for name, text in SOURCES.items()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
    assert lengths["runner/training/trainer.py"] <= MAX_LINES_OF_THE_LOOP
    assert [name for name in lengths if Path(name).stem in VAGUE_NAMES] == []
    folders = [str(Path(name).parent) for name in SOURCES if not name.endswith("__init__.py")]
    assert {folder: folders.count(folder) for folder in folders if folders.count(folder) > MAX_FILES} == {}


def test_no_function_is_longer_than_its_limit() -> None:
    functions = [
        (name, node)
        for name, text in SOURCES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    lengths = {f"{name}:{node.name}": (node.end_lineno or 0) - node.lineno + 1 for name, node in functions}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES_OF_A_FUNCTION} == {}
