"""The text of --help over a small tree of configuration, and over the runner's own."""

import shlex
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from commands import Commands

from runner import CONF
from runner.config.help.folders import Folders
from runner.config.help.rows import Row, example, option_rows, top_rows
from runner.config.help.topics import render_help
from runner.errors import InputError

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


def about(conf: Path, *words: str) -> list[str]:
    return render_help([conf], words).splitlines()


def block(text: str) -> list[str]:
    return textwrap.dedent(text).strip("\n").splitlines()


def test_the_overview_has_every_option_and_top_level_key_and_no_more(conf: Path):
    lines = about(conf)
    start = next(number for number, line in enumerate(lines) if line.startswith("GROUPS"))
    assert lines[start + 2 : lines.index("FLAGS") - 1] == block(
        """
      model=convnet         convnet, toy
      optimizer=sgd         fast, sgd
      hydra/launcher=basic  slots
      experiment=null       digits
      +extra=OPTION         one
      hydra/sweeper         grid

    KEYS: type KEY=VALUE

      the run                name, seed
      what it leaves behind  checkpoint.*
    """
    )
    for word in ("secret", "_base", "_private", "_target_", "_partial_", "sample_shape", "hydra.run", "more that"):
        assert word not in "\n".join(lines)


def test_usage_and_flags(conf: Path):
    text = render_help([conf], command="python -m other")
    assert text.startswith("usage: python -m other [GROUP=OPTION ...]")
    for words in (
        "python -m other ",
        "torchrun --nproc-per-node 4 -m other model=convnet parallel=ddp ",
        "python -m other -m model=",
        "python -m other --config-dir DIR",
        "python -m other --help parallel=fsdp ",
        "python -m other resume=last",
        "-m, --multirun",
        "-h, --help",
        "--info",
        "--hydra-help",
    ):
        assert f"\n  {words}" in text
    assert text.endswith("\n") and not any(line.endswith(" ") for line in text.splitlines())


def test_the_runners_own_overview_fits_a_screen_and_a_half():
    lines = render_help([CONF]).splitlines()
    assert len(lines) <= 75
    assert max(map(len, lines)) <= 110


def test_a_group_has_its_options_with_their_keys_types_values_and_comments(conf: Path, monkeypatch: pytest.MonkeyPatch):
    source = "class ConvNet:\n    def __init__(self, channels: list[int], rate: float | None, name: str): ...\n"
    monkeypatch.syspath_prepend(str(write(conf.parent / "code", {"nets.py": source})))
    write(conf, {"model/convnet.yaml": FILES["model/convnet.yaml"].replace("models.ConvNet", "nets.ConvNet")})
    assert about(conf, "model") == block("""
    model (default: convnet)

      convnet  two blocks, for images
        model.channels=[16, 32]  list[int]     output channels: two
        model.name=a # b         str           quoted
        model.steps=[1, 2]                     behind the key
        model.nested.size=3                    of the head
        model.empty=null
        model.text=''
        model.rate=1e-4          float | null
      toy

    example  python -m runner model=convnet
    """)


def test_an_option_has_what_it_starts_from_and_what_else_its_constructor_takes(
    conf: Path, monkeypatch: pytest.MonkeyPatch
):
    source = """
        class Base:
            def __init__(self, lr: float, beta: "float" = 0.9, *, kind: Literal["a", None] = None): ...
        class Descent(Base): ...
    """
    monkeypatch.syspath_prepend(str(write(conf.parent / "code", {"descents.py": textwrap.dedent(source)})))
    write(conf, {"optimizer/sgd.yaml": "# descent\n_target_: descents.Descent\nlr: 0.1  # learning rate\n"})
    assert about(conf, "optimizer=fast") == block(f"""
    optimizer=fast: the same, faster

      optimizer.lr=1.0  float

      also taken, though not in its file:

      +optimizer.beta=0.9   float
      +optimizer.kind=null  a | null

    example  python -m runner optimizer=fast
             python -m runner optimizer=fast optimizer.lr=1.0
    file     {conf}/optimizer/fast.yaml
    made by  descents.Descent
    """)
    assert "and the keys of sgd" in render_help([conf], ["optimizer"])


def test_a_preset_tells_what_it_sets_and_what_it_gave(conf: Path):
    assert about(conf, "experiment=digits") == block(f"""
    experiment=digits: 97 % in 12 s
    on two cores

      model=toy
      epochs=3   int  few

    example  python -m runner experiment=digits
    file     {conf}/experiment/digits.yaml
    """)
    assert "epochs" not in render_help([conf], ["experiment"])


@pytest.mark.parametrize("word", ["checkpoint.every", "every", "++checkpoint.every=3"])
def test_a_key_of_the_top_level(conf: Path, word: str):
    assert about(conf, word) == [
        "checkpoint.every=1  epochs",
        "",
        "example  python -m runner checkpoint.every=5 seed=1",
    ]


def test_a_key_of_several_options_and_keys_that_begin_alike(conf: Path):
    assert about(conf, "optimizer.lr") == block("""
    optimizer.lr

      optimizer=fast  optimizer.lr=1.0
      optimizer=sgd   optimizer.lr=0.1  learning rate

    example  python -m runner optimizer.lr=0.1
    """)
    assert "  model=convnet  model.nested.size=3  of the head" in about(conf, "model.nested")
    assert about(conf, "checkpoint")[2:4] == [
        "  checkpoint.every=1           epochs",
        "  checkpoint.deeper.keep=null  how many stay",
    ]
    assert about(conf, "keys")[2] == "  name=run                     str  runs are kept under outputs/NAME"


def test_several_topics_and_an_option_by_its_name_alone(conf: Path):
    toy = about(conf, "toy")
    assert toy == about(conf, "model=toy") == about(conf, "model@inner.place='toy'")
    assert "example  python -m runner model=toy data=toy" in toy
    assert about(conf, "toy", "extra") == [*toy, "", *about(conf, "extra")]
    assert about(conf, "model=[toy,convnet]") == [*toy, "", *about(conf, "model=convnet")]
    assert about(conf, "hydra/launcher=basic") == about(conf, "hydra/launcher")  # one of Hydra's own
    assert "  hydra.launcher.slots=2  jobs at once" in [line[2:] for line in about(conf, "hydra/launcher")]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("model=convnt", "no such model; did you mean convnet? (convnet, toy)"),
        ("modle=convnet", "no such group, option or key; did you mean --help model=convnet?"),
        ("optimizer.lrr", "no such group, option or key; did you mean --help optimizer.lr?"),
        ("slotz", "no such group, option or key; did you mean --help hydra/launcher=slots?"),
        ("zzz", "no such group, option or key; --help alone lists them"),
        ("one", "several have that name; type --help model=one or extra=one"),
    ],
)
def test_an_unknown_topic_is_answered_with_the_nearest(conf: Path, word: str, told: str):
    write(conf, {"model/one.yaml": ""} if word == "one" else {})
    with pytest.raises(InputError) as caught:
        about(conf, word)
    assert caught.value.messages == [f"--help {word}: {told}"]


def test_an_earlier_folder_adds_options_and_hides_those_of_its_names(conf: Path, tmp_path: Path):
    mine = {"model/own.yaml": "# mine\ndepth: 3\n", "model/toy.yaml": "# shown\n", "new/a.yaml": "# new\n"}
    (conf / "model" / "toy.yaml").write_text("# hidden\n")
    text = render_help([write(tmp_path / "mine", {**mine, "config.yaml": "other: 1\n"}), conf], ["all"])
    assert "  toy      shown\n" in text
    assert "  own      mine\n    model.depth=3\n" in text
    assert "\nnew\n\n  a  new\n\nexample  python -m runner +new=a\n" in text
    assert "hidden" not in text and "other=1" not in text


def test_broken_files_are_named_and_the_others_shown(conf: Path):
    (conf / "model/bad.yaml").write_text("a: 1\nb: [1\nc: 2\n")
    (conf / "model/binary.yaml").write_bytes(b"\xff\xfe")
    (conf / "model/list.yaml").write_text("# a list\n- 1\n")
    (conf / "model/round.yaml").write_text("defaults:\n  - round\n  - nowhere\n")
    text = render_help([conf], ["model"])
    assert f"  bad      cannot be read: {conf}/model/bad.yaml, line 3\n" in text
    assert f"  binary   cannot be read: {conf}/model/binary.yaml\n" in text
    assert "  list     a list\n" in text and "  convnet  two blocks" in text


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
    rows = [
        ("g.long_list=[1, 2]", "at its end"),
        ("g.mapping={a: 1, b: x}", "behind the mapping"),
        ("g.items=[{_target_: a.B, c: [2]}]", ""),
        ("g.block=one two", ""),
        ("g.nothing={}", "no keys"),
        ("g.größe=ü", "wide"),
        ("g.required=???", "to be given"),
        ("g.last=1", ""),
    ]
    shown = about(write(tmp_path, {"g/o.yaml": text}), "g")[3:-2]
    assert shown == [f"    {left:<35}{comment}".rstrip() for left, comment in rows]  # two more than the longest


def test_a_very_long_value_does_not_push_the_other_comments_away(conf: Path):
    (conf / "model" / "long.yaml").write_text(f"values: [{', '.join(map(str, range(40)))}]  # many\nsize: 3  # one\n")
    long, short = about(conf, "model=long")[2:4]
    assert long.endswith(", 39]  many") and short == "  model.size=3  one"


def test_without_a_main_file(tmp_path: Path):
    assert "usage:" in render_help([tmp_path]) and "usage:" in render_help([])


def test_every_example_of_the_runners_own_is_typed_in_words_that_exist():
    folders = Folders([CONF])
    rows: dict[str, list[Row]] = {"": top_rows(folders)}
    examples = [row.example for row in rows[""]]
    for group, options in folders.groups.items():
        for option in options:
            rows[f"{group}={option}"] = option_rows(folders, group, option)
            named = [row for row in rows[f"{group}={option}"] if not row.is_added]
            examples += [example(folders, group, option), *(row.example for row in named)]
    assert len(examples) > 300
    keys = {row.key for found in rows.values() for row in found}
    for words in map(shlex.split, dict.fromkeys(examples)):
        for word in words:
            name, _, value = word.lstrip("+").partition("=")
            chosen = {f"{name}={option}" for option in value.split(",")}
            assert name in keys or chosen <= rows.keys() or word == "-m", words


def test_it_reads_each_file_once_by_the_fastest_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Reading is what --help takes its time for."""
    write(tmp_path, {f"group{n % 6}/option{n}.yaml": FILES["model/convnet.yaml"] for n in range(60)})
    compose, loaders = yaml.compose, []

    def count(text: str, Loader: type) -> yaml.Node | None:
        loaders.append(Loader)
        return compose(text, Loader=Loader)

    monkeypatch.setattr(yaml, "compose", count)
    render_help([tmp_path], ["all"])
    assert loaders == [getattr(yaml, "CSafeLoader", yaml.SafeLoader)] * 60


def test_a_reader_that_has_had_enough_is_no_error(commands: Commands) -> None:
    done = commands.finish(commands.start_as(["sh", "-c", f"{sys.executable} -m runner --help | head -n 1"]))
    assert (done.stdout.splitlines()[0][:6], done.stderr) == ("usage:", "")


@pytest.mark.parametrize("words", [("--help", "parallel=fsdp"), ("parallel=fsdp", "-h")], ids=" ".join)
def test_topics_stand_on_either_side_of_the_flag(commands: Commands, words: tuple[str, ...]) -> None:
    done = commands.runner(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("parallel=fsdp: fully_shard") and "int " in done.stdout
    assert commands.runner("--help", "paralel").stderr == (
        "--help paralel: no such group, option or key; did you mean --help parallel?\n"
    )
