"""The arrows between the folders, read off the sources: who may import whom, and how long a file may be."""

import ast
from collections.abc import Iterator
from pathlib import Path

from runner import ROOT

FOLDERS = ("runner", "models", "data", "hydra_plugins")
HYDRA = ("hydra", "omegaconf", "hydra_plugins")
# Hydra composes in the entry; config.py hands it the schema, and going_on.py reads overrides by its grammar.
MAY_IMPORT_HYDRA = ("runner/entry.py", "runner/config.py", "runner/going_on.py", "runner/build.py")
MAY_IMPORT_HYDRA += ("runner/explain/", "runner/sweeps/", "hydra_plugins/")
MAY_READ_ENVIRONMENT = ("runner/launchers/",)


def sources(*folders: str) -> list[str]:
    found = [str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert found
    return sorted(found)


def nodes(name: str) -> Iterator[ast.AST]:
    return ast.walk(ast.parse((ROOT / name).read_text()))


def imports(name: str) -> Iterator[str]:
    """The modules that the file imports, inside of functions too: of `from a import b`, a and a.b."""
    for node in nodes(name):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name}:{node.lineno} imports relatively"
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def importers(names: list[str], *modules: str) -> list[str]:
    """Those of the files that import one of the modules, or what is in it."""
    return [name for name in names if any(f"{found}.".startswith(f"{m}.") for found in imports(name) for m in modules)]


def test_models_and_data_know_neither_the_runner_nor_distribution() -> None:
    assert importers(sources("models", "data"), "runner", "conf", *HYDRA, "torch.distributed") == []
    assert importers(sources("models"), "data") == []
    assert importers(sources("data"), "models") == []


def test_the_runner_knows_no_model_and_no_data() -> None:
    assert importers(sources("runner", "hydra_plugins"), "models", "data", "conf") == []


def test_hydra_lives_at_the_entry() -> None:
    found = importers(sources(*FOLDERS), *HYDRA)
    assert [name for name in found if not name.startswith(MAY_IMPORT_HYDRA)] == []
    assert all(any(name.startswith(place) for name in found) for place in MAY_IMPORT_HYDRA)  # none is there in vain


def test_the_environment_is_read_where_processes_come_to_be() -> None:
    def reads(name: str) -> bool:
        attributes = {node.attr for node in nodes(name) if isinstance(node, ast.Attribute)}
        return bool({"environ", "getenv"} & (attributes | {module.rpartition(".")[2] for module in imports(name)}))

    found = [name for name in sources(*FOLDERS) if reads(name)]
    assert [name for name in found if not name.startswith(MAY_READ_ENVIRONMENT)] == []
    assert all(any(name.startswith(place) for name in found) for place in MAY_READ_ENVIRONMENT)


def test_what_every_command_imports_is_light() -> None:
    """Hydra imports its plugins for each of them, completion too."""
    assert importers(sources("hydra_plugins", "runner/explain"), "torch", "torchvision", "numpy", "optuna") == []
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()  # other projects have plugins there too


def test_the_loop_does_not_ask_for_the_mode() -> None:
    modes = {path.stem for path in (ROOT / "conf" / "parallel").glob("*.yaml")}
    for name in ("runner/train.py", "runner/tasks/train.py", "runner/tasks/evaluate.py"):
        assert importers([name], *(f"runner.parallel.{mode}" for mode in modes)) == []
        assert not modes & {node.value for node in nodes(name) if isinstance(node, ast.Constant)}, name


def test_no_file_is_long_or_named_for_nothing_in_particular() -> None:
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in sources(*FOLDERS)}
    assert {name: length for name, length in lengths.items() if length > 300} == {}
    assert lengths["runner/train.py"] <= 250
    vague = ("utils", "helpers", "misc", "common", "manager", "registry")
    assert [name for name in lengths if Path(name).stem in vague] == []
