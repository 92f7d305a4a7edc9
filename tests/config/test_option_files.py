"""Files of options that cannot be read are refused with the file and the line; text in them is kept as written."""

from pathlib import Path

import pytest
from worlds import configure

from runner.errors import InputError

GLOBAL = "# @package _global_\n"


def refusal(folder: Path, name: str, content: bytes, *words: str) -> str:
    """Return the message for a command that reads this file, without the path of the directory."""
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    chosen = words or (f"{file.parent.name}={file.stem}",)
    with pytest.raises(InputError) as caught:
        configure(f"--config-dir={folder}", *chosen)
    (message,) = caught.value.messages
    return message.replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"_target_: x\n# \xe9\n", "line 2: byte 0xe9 is not UTF-8; save the file as UTF-8"),
        ("_target_: x\n".encode("utf-16"), "line 1: byte 0xff is not UTF-8; save the file as UTF-8"),
        (b"# a number\n3\n", "line 2: the file of an option must consist of KEY: VALUE, and this is the value 3"),
        (b"- a\n", "line 1: the file of an option must consist of KEY: VALUE, and this is a list"),
        (b"_target_: x\nnode:\n\tkey: 1\n", "line 3: a tab; indent with spaces"),
        (b"_target_: x\nkey: @b\n", "line 2: found character that cannot start any token"),
        (b"_target_: x\n_target_: y\n", "line 2: found duplicate key _target_"),
        (b"_target_: a: b\n", "line 1: mapping values are not allowed in this context"),
        (b"defaults: mlp\n", "line 1: defaults must be a list, such as `- mlp` or `- override /model: mlp`, and this"),
    ],
)
def test_the_file_and_the_line_are_named(content: bytes, problem: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, "model/odd.yaml", content).startswith(f"model=odd: model/odd.yaml, {problem}")


def test_a_file_of_a_defaults_list_is_named(tmp_path: Path) -> None:
    problem = "model/odd.yaml, line 1: byte 0xe9 is not UTF-8; save the file as UTF-8"
    assert refusal(tmp_path, "model/odd.yaml", b"\xe9").endswith(problem)
    assert refusal(tmp_path, "model/child.yaml", b"defaults: [odd]\n") == f"model=child: {problem}"
    preset = f"{GLOBAL}defaults: [override /model: odd]\n".encode()
    assert refusal(tmp_path, "experiment/own.yaml", preset) == f"experiment=own: {problem}"


def test_a_file_whose_suffix_hydra_ignores_is_refused(tmp_path: Path) -> None:
    node, problem = b"_target_: torch.nn.Flatten\n", "is not read; rename it to"
    assert refusal(tmp_path, "model/own.yml", node) == f"model=own: model/own.yml {problem} own.yaml"
    hiding = refusal(tmp_path, "model/convnet.yml", node, "seed=1")  # the default, which the built-in file defines
    assert hiding == f"model/convnet.yml {problem} convnet.yaml"
    configure(f"--config-dir={tmp_path}", "model=mlp", "data=digits")  # another option


def test_text_in_a_file_is_kept_as_written(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    content = f"{GLOBAL}name: 12e4567\noutputs: true\nseed: 1\ninit_from: {{path: 1_000}}\nmonitor: null\n"
    (tmp_path / "experiment" / "own.yaml").write_text(content)
    config, _ = configure(f"--config-dir={tmp_path}", "experiment=own")
    found = (config.name, config.outputs, config.seed, config.init_from.path, config.monitor)
    assert found == ("12e4567", "true", 1, "1_000", None)
