"""Tests of the text of --help, over a small configuration tree and over the built-in one."""

import shlex
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Commands

from runner.config.help.config_tree import ConfigTree
from runner.config.help.topics import render_help
from runner.errors import InputError
from runner.paths import CONF

FILES = {
    "config.yaml": """\
defaults:
  - schema
  - model: convnet
  - optimizer@inner.place: sgd
  - override hydra/launcher: basic
  - optional experiment: null
  - _self_

# the run
name: run  # runs are kept under outputs/NAME
seed: 0
# what it leaves behind
checkpoint:  # when the state is saved
  # example: checkpoint.every=5 seed=1
  every: 1  # epochs
  deeper:
    keep: null  # (int) how many stay
hydra:
  run:
    dir: .
""",
    "model/convnet.yaml": """\
# two blocks, for images
# more that is not shown
_target_: models.ConvNet
_partial_: true
sample_shape: ${data.sample_shape}  # one sample
channels: [16, 32]  # output channels: two
name: "a # b"  # quoted
steps:  # behind the key
  - 1  # behind an item
  - 2
nested:
  _target_: models.Head
  size: 3  # of the head
empty:
text: ''
rate: 1e-4
""",
    "model/toy.yaml": "# example: model=toy data=toy\n_target_: models.Toy\n",
    "model/_base.yaml": "# not for users\nsecret: 1\n",
    "model/notes.txt": "secret: 2\n",
    "_private/x.yaml": "secret: 3\n",
    "optimizer/sgd.yaml": "# @package _global_\n# descent\nlr: 0.1  # learning rate\n",
    "optimizer/fast.yaml": "# the same, faster\ndefaults:\n  - sgd\n  - _self_\nlr: 1.0\n",
    "extra/one.yaml": "# an extra\nx: 1\n",
    "hydra/launcher/slots.yaml": "# jobs share the machine\nslots: 2  # jobs at once\n",
    "hydra/sweeper/grid.yaml": "# all\n",
    "experiment/digits.yaml": """\
# @package _global_
# 97 % in 12 s
# on two cores
defaults:
  - override /model: toy
epochs: 3  # few
""",
}


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return write(tmp_path / "conf", FILES)


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def about(conf: Path, *args: str) -> list[str]:
    return render_help([conf], args).splitlines()


def block(text: str) -> list[str]:
    return textwrap.dedent(text).strip("\n").splitlines()


def test_overview_lists_all_options_and_top_level_keys(conf: Path):
    lines = about(conf)
    start = next(number for number, line in enumerate(lines) if line.startswith("GROUPS"))
    assert lines[start + 2 : lines.index("FLAGS") - 1] == block(
        """
      model=convnet         convnet, toy
      optimizer=sgd         fast, sgd
      hydra/launcher=basic  slots
      experiment=null       digits
      +extra=OPTION         one
      hydra/sweeper=OPTION  grid

    KEYS: KEY=VALUE

      the run                name, seed
      what it leaves behind  checkpoint.*
    """
    )
    for word in ("secret", "_base", "_private", "_target_", "_partial_", "sample_shape", "hydra.run", "more that"):
        assert word not in "\n".join(lines)


def test_builtin_overview_fits_a_screen_and_a_half():
    text = render_help([CONF])
    lines = text.splitlines()
    assert len(lines) <= 75 and max(map(len, lines)) <= 110
    assert text.startswith("usage: python -m runner [GROUP=OPTION ...]") and "\n  -m, --multirun" in text
    assert text.endswith("\n") and not any(line.endswith(" ") for line in lines)


def test_group_topic_lists_keys_with_types_values_and_comments(conf: Path, monkeypatch: pytest.MonkeyPatch):
    source = "class ConvNet:\n    def __init__(self, channels: list[int], rate: float | None, name: str): ...\n"
    monkeypatch.syspath_prepend(str(write(conf.parent / "code", {"nets.py": source})))
    write(conf, {"model/convnet.yaml": FILES["model/convnet.yaml"].replace("models.ConvNet", "nets.ConvNet")})
    assert about(conf, "model") == block("""
    model (default: convnet)

      convnet  two blocks, for images
        model.channels=[16, 32]  list[int]     output channels: two
        model.name=a # b         str           quoted
        model.steps=[1, 2]       list          behind the key
        model.nested.size=3      int           of the head
        model.empty=null
        model.text=''            str
        model.rate=1e-4          float | null
      toy

    example  python -m runner model=convnet
    """)


def test_option_topic_lists_inherited_keys(conf: Path):
    write(conf, {"optimizer/sgd.yaml": "# descent\n_target_: descents.Descent\nlr: 0.1  # learning rate\nbeta: 1\n"})
    assert about(conf, "optimizer=fast") == block(f"""
    optimizer=fast: the same, faster

      optimizer.lr=1.0  float
      optimizer.beta=1  int

    example  python -m runner optimizer=fast
             python -m runner optimizer=fast optimizer.lr=1.0
    file     {conf}/optimizer/fast.yaml
    class    descents.Descent
    """)


def test_top_level_key(conf: Path):
    expected = """
    checkpoint.every

      checkpoint.every=1  int  epochs

    example  python -m runner checkpoint.every=5 seed=1
    """
    assert [about(conf, word) for word in ("checkpoint.every", "every", "++checkpoint.every=3")] == [
        block(expected)
    ] * 3


def test_key_of_several_options_and_prefix_of_keys(conf: Path):
    assert about(conf, "optimizer.lr") == block("""
    optimizer.lr

      optimizer=sgd   optimizer.lr=0.1  float  learning rate
      optimizer=fast  optimizer.lr=1.0  float

    example  python -m runner optimizer=sgd optimizer.lr=0.1
    """)
    assert "  model=convnet  model.nested.size=3  int  of the head" in about(conf, "model.nested")
    assert "  checkpoint.deeper.keep=null  int | null  how many stay" in about(conf, "checkpoint")
    assert about(conf, "keys")[2] == "  name=run                     str         runs are kept under outputs/NAME"


def test_several_topics_and_an_option_without_its_group(conf: Path):
    toy = about(conf, "toy")
    assert toy == about(conf, "model=toy") == about(conf, "model@inner.place='toy'")
    assert "example  python -m runner model=toy data=toy" in toy
    assert about(conf, "toy", "extra") == [*toy, "", *about(conf, "extra")]
    assert about(conf, "model=[toy,convnet]") == [*toy, "", *about(conf, "model=convnet")]
    assert about(conf, "sgd", "one") == about(conf, "optimizer=sgd", "extra=one")
    write(conf, {"extra/toy.yaml": ""})
    assert about(conf, "toy") == about(conf, "model=toy", "extra=toy")  # both have that name
    assert about(conf, "hydra/launcher=basic") == about(conf, "hydra/launcher")  # a group of Hydra
    assert "  hydra.launcher.slots=2  int  jobs at once" in [line[2:] for line in about(conf, "hydra/launcher")]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model=convnt", "no such model; did you mean convnet? (convnet, toy)"),
        ("modle=convnet", "no such group, option or key; did you mean --help model=convnet?"),
        ("optimizer.lrr", "no such group, option or key; did you mean --help optimizer.lr?"),
        ("zzz", "no such group, option or key; --help without a topic lists them"),
    ],
)
def test_unknown_topic_suggests_the_nearest(conf: Path, word: str, message: str):
    with pytest.raises(InputError) as caught:
        about(conf, word)
    assert caught.value.messages == [f"--help {word}: {message}"]


def test_broken_files_are_named_and_the_others_shown(conf: Path):
    (conf / "model/bad.yaml").write_text("a: 1\nb: [1\nc: 2\n")
    (conf / "model/binary.yaml").write_bytes(b"\xff\xfe")
    (conf / "model/round.yaml").write_text("defaults:\n  - round\n  - nowhere\n")
    text = render_help([conf], ["model"])
    assert f"  bad      cannot be read: {conf}/model/bad.yaml, line 3\n" in text
    assert f"  binary   cannot be read: {conf}/model/binary.yaml\n" in text
    assert "  convnet  two blocks" in text


def test_builtin_keys_have_types_and_comments_and_examples_use_existing_names():
    tree = ConfigTree([CONF])
    keys = {"": tree.main.keys}
    keys |= {
        f"{group}={option}": tree.option_keys(group, option) for group in tree.groups for option in tree.groups[group]
    }
    examples = [tree.example(group, option) for group in tree.groups for option in tree.groups[group]]
    examples += [key.arguments for found in keys.values() for key in found]
    assert len(examples) > 300
    names = {key.name for found in keys.values() for key in found}
    for words in map(shlex.split, dict.fromkeys(examples)):
        for word in words:
            name, _, value = word.lstrip("+").partition("=")
            chosen = {f"{name}={option}" for option in value.split(",")}
            assert name in names or chosen <= keys.keys() or word == "-m", words
    described = [key for option, found in keys.items() if not option.startswith("experiment=") for key in found]
    own = [key for key in described if "${" not in key.value]
    assert [key.name for key in own if not key.type or not key.comment] == []


def test_closed_pipe_is_no_error(commands: Commands) -> None:
    done = commands.finish(commands.start_as(["sh", "-c", f"{sys.executable} -m runner --help | head -n 1"]))
    assert (done.stdout.splitlines()[0][:6], done.stderr) == ("usage:", "")


def test_topics_are_accepted_on_either_side_of_the_flag(
    here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (("--help", "parallel=fsdp"), ("parallel=fsdp", "-h")):
        assert here(*words) == 0
        text = capsys.readouterr().out
        assert text.startswith("parallel=fsdp: fully_shard") and "int " in text
    assert here("--help", "paralel") == 2
    hint = "did you mean --help parallel?"
    assert capsys.readouterr().err == f"--help paralel: no such group, option or key; {hint}\n"
