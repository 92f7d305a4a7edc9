"""What --help says when it is asked for nothing in particular: all that there is, in a screen and a half."""

from runner.config.help.folders import Folders
from runner.config.help.layout import columns, listed
from runner.config.help.rows import is_chosen

_EXAMPLES = (
    ("{command}", "one run in this process"),
    ("{command} model=toy data=toy epochs=3", "groups choose, key=value sets"),
    ("{torchrun} model=convnet parallel=ddp", "four processes"),
    ("{command} -m model=toy,convnet optimizer.lr=0.1,0.01", "a sweep"),
    ("{command} --config-dir DIR model=mine", "your own DIR/model/mine.yaml"),
    ("{command} --cfg job", "show the configuration, run nothing"),
    ("{command} resume=last", "resume the newest run"),
)
_TOPICS = (
    ("--help parallel", "a group: its options, and their keys with type, default and meaning"),
    ("--help parallel=fsdp", "an option"),
    ("--help checkpoint.keep", "a key; --help checkpoint: those that begin so"),
    ("--help keys", "all keys of the top level, a line each"),
    ("--help all", "everything"),
)
_FLAGS = (
    ("-h, --help [TOPIC ...]", "this, or what is known of the topics"),
    ("-m, --multirun", "a sweep: one job for each combination of the values typed with commas"),
    ("--config-dir DIR", "your own options, which win over those of the same name; of several DIRs the later"),
    ("", "wins; resume= and run= search those of the run too, before them"),
    ("--cfg job", "print the configuration; --resolve fills in its references"),
    ("--info defaults", "print which files it is made of"),
    ("--hydra-help", "the other flags of Hydra, which reads all of this; see https://hydra.cc"),
)


def overview(folders: Folders, command: str) -> list[str]:
    torchrun = "torchrun --nproc-per-node 4 " + command.removeprefix("python ")
    examples = [(text.format(command=command, torchrun=torchrun), meaning) for text, meaning in _EXAMPLES]
    topics = [(f"{command} {text}", meaning) for text, meaning in _TOPICS]
    return [
        f"usage: {command} [GROUP=OPTION ...] [GROUP.KEY=VALUE ...] [KEY=VALUE ...] [FLAGS]",
        "",
        *columns(examples, 2),
        "",
        "MORE: type any of these words behind --help",
        "",
        *columns(topics, 2),
        "",
        "GROUPS: type GROUP=OPTION, and GROUP.KEY=VALUE for the keys of the option; below, each with its default",
        "",
        *listed([(_typed(folders, group), options) for group, options in folders.groups.items()], 2),
        "",
        "KEYS: type KEY=VALUE",
        "",
        *listed(_parts(folders).items(), 2),
        "",
        "FLAGS",
        "",
        *columns(_FLAGS, 2),
    ]


def _typed(folders: Folders, group: str) -> str:
    if not is_chosen(folders, group):
        return f"+{group}=OPTION"
    default = folders.default(group)
    return f"{group}={default}" if default is not None else group


def _parts(folders: Folders) -> dict[str, list[str]]:
    """The top-level keys by the headings that they are under; those with keys of their own once, as `checkpoint.*`."""
    parts: dict[str, list[str]] = {}
    for key in folders.main.keys:
        name, dot, _ = key.name.partition(".")
        names = parts.setdefault(key.heading, [])
        if name + dot.replace(".", ".*") not in names:
            names.append(name + dot.replace(".", ".*"))
    return parts
