"""The commands `python -m runner runs ...`, which list and manage runs without importing torch."""

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich import filesize

from runner.api import manage
from runner.checkpoints.pull import ALL, pull
from runner.errors import InputError, did_you_mean, nearest, printable
from runner.records import listing
from runner.records.finding import find_records
from runner.records.run_files import dumps
from runner.records.tables import text_table
from runner.remote.address import is_remote

LIMIT = 50
_ABOUT = """\
RUN is the directory of a run, of a job or of a sweep, `last` for the newest run or sweep, or the beginning of a name
that only one of them has: 20261120-19, name/20261120-19, sweep-20261120-192348/3
"""


def run_command(arguments: Sequence[str]) -> int:
    """Run a command, print its result, and return the exit status. Raises InputError for invalid arguments."""
    parser, commands = _parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        hint = did_you_mean(arguments[0], commands).replace("mean ", "mean runs ")
        raise InputError(f"runs {arguments[0]}: no such command{hint}")
    try:
        args = parser.parse_args(arguments or ["--help"])
    except SystemExit:  # --help has been printed
        return 0
    changed = [args.run] if args.action in (_tag, _stop) else args.runs if args.action in (_archive, _delete) else []
    if remote := [run for run in changed if is_remote(run)]:
        raise InputError(f"RUN={remote[0]}: only list, show and pull accept an address; use the tools of the store")
    return args.action(args) or 0


def suggest(words: Sequence[str]) -> str | None:
    """Return the most similar command, such as `runs list` for `run lst`, or None if no command is similar."""
    commands = _parser()[1]
    second = words[1] if len(words) > 1 else "list"
    if nearest(words[0], ["runs"]):
        return f"runs {nearest(second, commands) or 'list'}"
    return f"runs {near}" if (near := nearest(words[0], commands)) else None


def complete(line: str) -> list[str]:
    """Return the words that complete `line`, a command line such as `runner runs show run/2026`, before the cursor."""
    *before, word = [*line.split()[2:], *([""] if line.endswith(" ") else [])]
    commands = _parser()[1]
    if not before or before[0] not in commands:
        return [] if before else [name for name in commands if name.startswith(word)]
    options = commands[before[0]]._option_string_actions
    option = options.get(before[-1])
    if word.startswith("-"):
        found = [*options]
    elif option and option.nargs != 0:  # an option with a value
        found = [*(option.choices or ())]
    elif before[0] == "list":  # its argument is a directory, which the shell completes by itself
        found = []
    else:
        outputs = before[before.index("--outputs") + 1] if "--outputs" in before else "outputs"
        found = ["last", *_names(Path(outputs), word)]
    return [each for each in found if each.startswith(word)]


def _names(folder: Path, word: str) -> Iterator[str]:
    """Yield the names of runs and sweeps, and of the jobs of a sweep whose name `word` starts with."""
    sweeps = set[Path]()
    for path, is_sweep in find_records(folder):
        if path.parent not in sweeps or word.startswith(f"{path.parent.relative_to(folder)}/"):
            yield str(path.relative_to(folder))
        if is_sweep:
            sweeps.add(path)


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise InputError instead of printing the usage."""
        raise InputError(f"{self.prog.partition('runner ')[2]}: {message}; --help describes the arguments")


def _parser() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """Return the parser, and the parser of each command by its name."""
    parser = _Parser("python -m runner runs", description="List and manage runs and sweeps.", allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    def add(name: str, action: object, about: str, runs: str | None = None, **flags: str) -> ArgumentParser:
        """Add a command with these flags. `runs` is "run" for one argument RUN, and "runs" for several."""
        options: dict[str, Any] = {"help": about, "description": f"{about}.", "epilog": _ABOUT if runs else None}
        options |= {"allow_abbrev": False, "formatter_class": RawDescriptionHelpFormatter}
        command: ArgumentParser = commands.add_parser(name, **options)
        command.set_defaults(action=action)
        if runs:
            command.add_argument(runs, metavar="RUN", nargs="+" if runs == "runs" else None)
            command.add_argument("--outputs", default="outputs", metavar="DIR", help="the directory of the names")
        for flag, meaning in flags.items():
            command.add_argument(f"--{flag}", action="store_true", help=meaning)
        return command

    flags = {"jobs": "list jobs instead of their sweeps", "archived": "also list archived ones", "json": "print JSON"}
    command = add("list", _list, "list runs and sweeps, the newest first", **flags)
    command.add_argument("folder", nargs="?", default="outputs", metavar="FOLDER", help="the directory (outputs)")
    for name, meaning in {
        "where KEY=VALUE": "only runs with this recorded value",
        "state STATE": f"only runs in this state: {', '.join(listing.STATES)}",
        "tag WORD": "only runs with this tag",
    }.items():
        flag, metavar = name.split()
        choices = listing.STATES if flag == "state" else None
        command.add_argument(f"--{flag}", action="append", default=[], metavar=metavar, choices=choices, help=meaning)
    command.add_argument("--name", default="", metavar="TEXT", help="only names that contain TEXT; may contain * and ?")
    command.add_argument("--sort", choices=listing.ORDERS, default="started", help="the order (started)")
    command.add_argument("--limit", type=int, metavar="N", help=f"at most N rows; 0: all ({LIMIT}, with --json 0)")
    add("show", _show, "show a run, or a sweep and its jobs", "run", json="print JSON")
    command = add("tag", _tag, "add tags", "run", remove="remove the tags instead")
    command.add_argument("words", nargs="+", metavar="WORD")
    add("archive", _archive, "do not list runs any more; they stay in their directories", "runs", restore="list them")
    add("stop", _stop, "send the signal that saves a checkpoint and ends the run", "run")
    add("delete", _delete, "delete runs and sweeps that are not in progress", "runs", yes="do not ask")
    command = add("pull", _pull, "copy the runs at an address, which has credentials and endpoint in the environment")
    command.add_argument("address", metavar="ADDRESS", help="a run or a directory of runs: s3://bucket/prefix")
    command.add_argument("directory", nargs="?", metavar="DIR", help="the directory of the copy (~/.cache/...)")
    return parser, {**commands.choices}


def _list(args: Namespace) -> None:
    folder, skipped = _local(args.folder, "runs list"), list[str]()
    if not folder.is_dir():
        raise InputError(f"runs list {folder}: no such directory; name one that contains runs, such as outputs")
    listed = listing.list_entries(folder, args.jobs, skipped)
    entries = [entry for entry in listed if args.archived or not entry.labels.archived]
    entries = listing.select(entries, args.where, args.tag, args.state, args.name, skipped)
    entries.sort(key=listing.ORDERS[args.sort])
    limit = args.limit if args.limit is not None else 0 if args.json else LIMIT
    shown = entries[:limit] if limit > 0 else entries
    if args.json:
        print(dumps([listing.as_json(entry) for entry in shown], indent=1))
    elif shown:
        print(text_table(listing.as_cells(shown)))
    notes = [f"{len(entries) - len(shown)} more; --limit 0 lists all"] if len(shown) < len(entries) else []
    notes += [] if entries else [f"{folder} contains no {'such ' if listed else ''}run"]
    for line in (*notes, *skipped):
        print(printable(line), file=sys.stderr)


def _local(text: str, command: str) -> Path:
    """Return the path, or the directory of the copy of the records at an address, without checkpoints."""
    return pull(text, command, None) if is_remote(text) else Path(text)


def _pull(args: Namespace) -> None:
    directory = Path(args.directory).absolute() if args.directory else None
    print(f"copied to {pull(args.address, 'runs pull', (ALL,), directory=directory)}")


def _show(args: Namespace) -> None:
    args.run = str(_local(args.run, "runs show"))
    if args.json:
        print(dumps(manage.show(args.run, args.outputs), indent=1))
        return
    path, folder = listing.find_record(args.run, args.outputs), Path(args.outputs).absolute()
    entry = listing.read_entry(path, folder)
    facts = listing.as_facts(entry)
    width = max(map(len, facts))
    print("\n".join(printable(f"{name:<{width}}  {text}") for name, text in facts.items()))
    if entry.is_sweep:
        print(f"\n{text_table(listing.as_cells(listing.list_entries(path)))}")


def _tag(args: Namespace) -> None:
    manage.tag(args.run, *args.words, remove=args.remove, outputs=args.outputs)


def _archive(args: Namespace) -> None:
    paths = [listing.find_record(run, args.outputs) for run in args.runs]  # `last` before the first change
    for path in paths:
        manage.archive(path, args.restore)


def _stop(args: Namespace) -> None:
    path = listing.find_record(args.run, args.outputs, adds_jobs=True)
    if process := manage.stop(path):
        print(f"sent SIGTERM to process {process}: {path} saves a checkpoint after the current step, and ends")
    else:
        print(f"{path} has not started, and is not going to: -m resume={path.parent} runs it")


def _delete(args: Namespace) -> None:
    folder = Path(args.outputs).absolute()
    paths = list(dict.fromkeys(listing.find_record(run, folder) for run in args.runs))
    for path in paths:
        manage.check_deletable(path)
    entries = [listing.read_entry(path, folder) for path in paths]
    print(text_table(listing.as_cells(entries)), flush=True)
    for path in paths:
        if forks := manage.forks_of(path, folder):
            listed = ", ".join(str(fork.relative_to(folder)) for fork in forks)
            print(printable(f"runs started from {path.name}, and keep a copy of its checkpoint: {listed}"), flush=True)
    if not args.yes:
        total = filesize.decimal(sum(entry.size for entry in entries))
        what = "this directory" if len(entries) == 1 else f"these {len(entries)} directories"
        try:
            answer = input(f"delete {what} ({total})? [y/N] ")
        except EOFError:
            raise InputError("runs delete: the question has no answer without a terminal; add --yes") from None
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return
    for path in paths:
        manage.delete(path)
        print(f"deleted {path}", flush=True)
