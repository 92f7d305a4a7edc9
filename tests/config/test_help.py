"""The text of --help over a small tree of configuration: every option, key, value and comment, and no more."""

import sys
from pathlib import Path

import pytest
import yaml
from commands import Commands

from runner.config.help import render_help

FILES = {
    "config.yaml": """\
defaults:
  - schema
  - model: convnet
  - optimizer@inner.place: sgd
  - override hydra/launcher: basic
  - optional experiment: null
  - _self_

name: run  # runs are kept under outputs/NAME
seed: 0
checkpoint:  # when the state is saved
  every: 1  # epochs
  deeper:
    keep: null  # how many stay
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
    "model/toy.yaml": "_target_: models.Toy\n",
    "model/_base.yaml": "# not for users\nsecret: 1\n",
    "model/notes.txt": "secret: 2\n",
    "_private/x.yaml": "secret: 3\n",
    "optimizer/sgd.yaml": "# @package _global_\n# descent\nlr: 0.1  # learning rate\n",
    "optimizer/fast.yaml": "# the same, faster\ndefaults:\n  - sgd\n  - _self_\nlr: 1.0\n",
    "extra/one.yaml": "# an extra\nx: 1\n",
    "hydra/launcher/slots.yaml": "# jobs share the machine\nslots: 2  # jobs at once\n",
    "hydra/sweeper/grid.yaml": "# all\n",
    "experiment/digits.yaml": "# @package _global_\n# 97 % in 12 s\n# on two cores\nepochs: 3  # few\n",
}


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return write(tmp_path / "conf", FILES)


@pytest.fixture
def lines(conf: Path) -> list[str]:
    return render_help([conf]).splitlines()


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def block(lines: list[str], head: str) -> list[str]:
    """The lines from the one that begins with `head` up to the next empty one."""
    start = next(index for index, line in enumerate(lines) if line.startswith(head))
    return lines[start : lines.index("", start)]


def test_a_group_with_its_options_keys_values_and_comments(lines: list[str]):
    assert block(lines, "model ") == [
        "model                                   (default: convnet)",
        "  convnet        two blocks, for images",
        "    channels=[16, 32]       output channels: two",
        "    name=a # b              quoted",
        "    steps=[1, 2]            behind the key",
        "    nested.size=3           of the head",
        "    empty=null",
        "    text=''",
        "    rate=1e-4",
        "  toy",
    ]


def test_a_very_long_value_does_not_push_the_other_comments_away(conf: Path):
    (conf / "model" / "long.yaml").write_text(f"values: [{', '.join(map(str, range(40)))}]  # many\nsize: 3  # one\n")
    long, short = block(render_help([conf]).splitlines(), "  long")[1:3]
    assert long.endswith(", 39]  many")
    assert short == "    size=3                  one"


def test_the_package_line_is_no_description_and_inherited_keys_are_named(lines: list[str]):
    assert block(lines, "optimizer") == [
        "optimizer                               (default: sgd)",
        "  fast           the same, faster",
        "    lr=1.0",
        "    and the keys of sgd",
        "  sgd            descent",
        "    lr=0.1                  learning rate",
    ]


def test_presets_are_described_and_their_keys_left_out(lines: list[str]):
    assert block(lines, "experiment") == [
        "experiment                              (default: none chosen)",
        "  digits         97 % in 12 s",
    ]


def test_nested_groups_and_groups_outside_the_defaults(lines: list[str]):
    assert block(lines, "hydra/launcher") == [
        "hydra/launcher                          (default: basic)",
        "  slots          jobs share the machine",
        "    slots=2                 jobs at once",
    ]
    assert block(lines, "hydra/sweeper") == ["hydra/sweeper", "  grid           all"]
    assert block(lines, "extra")[0] == "extra                                   (type +extra=OPTION)"


def test_groups_come_in_the_order_of_the_defaults_then_by_name(lines: list[str]):
    names = ["model", "optimizer", "hydra/launcher", "experiment", "extra", "hydra/sweeper"]
    assert [line.split()[0] for line in lines if line.split() and line.split()[0] in names and line[0] != " "] == names


def test_top_level_keys(lines: list[str]):
    start = lines.index("KEYS: type KEY=VALUE")
    assert lines[start + 2 : start + 6] == [
        "  name=run                     runs are kept under outputs/NAME",
        "  seed=0",
        "  checkpoint.every=1           epochs",
        "  checkpoint.deeper.keep=null  how many stay",
    ]


def test_what_is_not_for_users_stays_out(lines: list[str]):
    text = "\n".join(lines)
    for word in ("secret", "_base", "_private", "_target_", "_partial_", "sample_shape", "hydra.run", "more that"):
        assert word not in text


def test_usage_and_flags(conf: Path):
    text = render_help([conf], command="python -m other")
    assert text.startswith("usage: python -m other [GROUP=OPTION ...]")
    for example in (
        "python -m other ",
        "torchrun --nproc-per-node 4 -m other model=convnet parallel=ddp ",
        "python -m other -m model=",
        "python -m other --config-dir DIR",
        "python -m other --cfg job",
        "python -m other resume=last",
    ):
        assert f"  {example}" in text
    for flag in ("-m, --multirun", "--config-dir DIR", "--cfg job", "--info", "--hydra-help"):
        assert f"\n  {flag}" in text
    assert text.endswith("\n") and not any(line.endswith(" ") for line in text.splitlines())


def test_an_earlier_folder_adds_options_and_hides_those_of_its_names(conf: Path, tmp_path: Path):
    mine = {"model/own.yaml": "# mine\ndepth: 3\n", "model/toy.yaml": "# shown\n", "new/a.yaml": "# new\n"}
    (conf / "model" / "toy.yaml").write_text("# hidden\n")
    text = render_help([write(tmp_path / "mine", {**mine, "config.yaml": "other: 1\n"}), conf])
    assert "  toy            shown\n" in text
    assert "  own            mine\n    depth=3\n" in text
    assert "\nnew                                     (type +new=OPTION)\n  a              new\n" in text
    assert "hidden" not in text and "other=1" not in text


def test_broken_files_are_named_and_the_others_shown(conf: Path):
    (conf / "model/bad.yaml").write_text("a: 1\nb: [1\nc: 2\n")
    (conf / "model/binary.yaml").write_bytes(b"\xff\xfe")
    (conf / "model/list.yaml").write_text("# a list\n- 1\n")
    text = render_help([conf])
    assert f"  bad            cannot be read: {conf}/model/bad.yaml, line 3\n" in text
    assert f"  binary         cannot be read: {conf}/model/binary.yaml\n" in text
    assert "  list           a list\n" in text and "  convnet        two blocks" in text


def test_values_in_all_their_forms(tmp_path: Path):
    text = """\
long_list: [1,
  2]  # at its end
mapping: {a: 1, b: x}  # behind the mapping
items:
  - {_target_: a.B, c: [2]}
block: |
  one
  two
nothing: {}  # no keys
größe: ü  # wide
required: ???  # to be given
last: 1"""
    shown = block(render_help([write(tmp_path, {"g/o.yaml": text})]).splitlines(), "g ")
    rows = [
        ("long_list=[1, 2]", "at its end"),
        ("mapping={a: 1, b: x}", "behind the mapping"),
        ("items=[{_target_: a.B, c: [2]}]", ""),
        ("block=one two", ""),
        ("nothing={}", "no keys"),
        ("größe=ü", "wide"),
        ("required=???", "to be given"),
        ("last=1", ""),
    ]
    assert shown[2:] == [f"    {left:<33}{comment}".rstrip() for left, comment in rows]  # two more than the longest


def test_without_a_main_file(tmp_path: Path):
    assert "usage:" in render_help([tmp_path]) and "usage:" in render_help([])


def test_it_reads_each_file_once_by_the_fastest_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Reading is what --help takes its time for."""
    write(tmp_path, {f"group{n % 6}/option{n}.yaml": FILES["model/convnet.yaml"] for n in range(60)})
    compose, loaders = yaml.compose, []

    def count(text: str, Loader: type) -> yaml.Node | None:
        loaders.append(Loader)
        return compose(text, Loader=Loader)

    monkeypatch.setattr(yaml, "compose", count)
    render_help([tmp_path])
    assert loaders == [getattr(yaml, "CSafeLoader", yaml.SafeLoader)] * 60


def test_a_reader_that_has_had_enough_is_no_error(commands: Commands) -> None:
    done = commands.finish(commands.start_as(["sh", "-c", f"{sys.executable} -m runner --help | head -n 1"]))
    assert (done.stdout.splitlines()[0][:6], done.stderr) == ("usage:", "")
