"""The commands `python -m runner runs ...`, which list and manage runs without importing torch."""

import os
import shutil
import signal
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from runner.errors import InputError, did_you_mean, nearest, printable
from runner.records import listing
from runner.records.attempts import last_line, read_attempts
from runner.records.labels import read_labels, write_labels
from runner.records.ledger import STOPPING, is_sweep, lock_sweep, read_ledger, unlock_sweep, write_state
from runner.records.record_files import dumps
from runner.records.result import read_result
from runner.records.run_directory import CHECKPOINTS
from runner.records.run_lock import LockOwner, find_owner, lock_directory
from runner.records.tables import text_table

LIMIT = 50
SHOWN = ("task", "model", "data", "parallel", "world_size", "step", "epoch", "seconds")
_ABOUT = """\
RUN is the directory of a run, of a job or of a sweep, `last` for the newest run or sweep, or the beginning of a name
that only one of them has: 20261120-19, name/20261120-19, sweep-20261120-192348/3
"""


def run_command(arguments: Sequence[str]) -> int:
    """Run a command, print its result, and return 0. Raises InputError for invalid arguments."""
    parser, commands = _parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        hint = did_you_mean(arguments[0], commands).replace("mean ", "mean runs ")
        raise InputError(f"runs {arguments[0]}: no such command{hint}")
    try:
        args = parser.parse_args(arguments or ["--help"])
    except SystemExit:  # --help has been printed
        return 0
    args.action(args)
    return 0


def suggest(words: Sequence[str]) -> str | None:
    """Return the most similar command, such as `runs list` for `run lst`, or None if no command is similar."""
    commands = _parser()[1]
    second = words[1] if len(words) > 1 else "list"
    if nearest(words[0], ["runs"]):
        return f"runs {nearest(second, commands) or 'list'}"
    return f"runs {near}" if (near := nearest(words[0], commands)) else None


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise InputError instead of printing the usage."""
        raise InputError(f"{self.prog.partition('runner ')[2]}: {message}; --help describes the arguments")


def _parser() -> tuple[ArgumentParser, list[str]]:
    """Return the parser, and the names of the commands."""
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
    command = add("note", _note, "set the note; an empty TEXT removes it", "run")
    command.add_argument("text", metavar="TEXT")
    add("archive", _archive, "do not list runs any more; they stay in their directories", "runs", restore="list them")
    add("stop", _stop, "send the signal that saves a checkpoint and ends the run", "run")
    add("delete", _delete, "delete runs and sweeps that are not in progress", "runs", yes="do not ask")
    return parser, list(commands.choices)


def _list(args: Namespace) -> None:
    folder, skipped = Path(args.folder), list[str]()
    if not folder.is_dir():
        raise InputError(f"runs list {folder}: no such directory; name one that contains runs, such as outputs")
    listed = listing.list_rows(folder, args.jobs, skipped)
    rows = [row for row in listed if args.archived or not row.labels.archived]
    rows = listing.select(rows, args.where, args.tag, args.state, args.name)
    rows.sort(key=listing.ORDERS[args.sort])
    limit = args.limit if args.limit is not None else 0 if args.json else LIMIT
    shown = rows[:limit] if limit > 0 else rows
    if args.json:
        print(dumps([row.as_dict() for row in shown], indent=1))
    elif shown:
        print(text_table(listing.as_cells(shown)))
    notes = [f"{len(rows) - len(shown)} more; --limit 0 lists all"] if len(shown) < len(rows) else []
    notes += [] if rows else [f"{folder} contains no {'such ' if listed else ''}run"]
    for line in (*notes, *skipped):
        print(printable(line), file=sys.stderr)


def _show(args: Namespace) -> None:
    path, folder = _find(args.run, args)
    row, result = listing.read_row(path, folder), read_result(path) or {}
    if args.json:
        print(dumps(row.as_dict() | {"result": result}, indent=1))
        return
    facts = {
        "path": str(path),
        "state": " ".join(filter(None, [row.state, row.done])),
        "error": last_line(str(result.get("error") or "")),
        "command": " ".join(map(str, result.get("command") or [])),
        **{key: result.get(key) for key in SHOWN},
        "age": listing.describe_age(time.time() - row.started),
        "size": listing.describe_size(row.size),
        "attempts": ", ".join(str(attempt.state) for attempt in read_attempts(path)),
        "checkpoints": ", ".join(sorted(each.name for each in (path / CHECKPOINTS).glob("step_*"))),
        "tags": " ".join(row.labels.tags),
        "note": row.labels.note,
    }
    if row.monitor:
        facts |= {row.monitor.name: f"best {listing.show(row.best)}, last {listing.show(row.last)}"}
    facts |= {name: listing.show(value) for name, value in result.get("metrics", {}).items() if name not in facts}
    width = max(map(len, facts))
    lines = (f"{key:<{width}}  {value}" for key, value in facts.items() if value not in (None, ""))
    print("\n".join(map(printable, lines)))
    if row.is_sweep:
        print(f"\n{text_table(listing.as_cells(listing.list_rows(path)))}")


def _tag(args: Namespace) -> None:
    path, _ = _find(args.run, args)
    labels = read_labels(path)
    if args.remove and (missing := [word for word in args.words if word not in labels.tags]):
        raise InputError(f"{path} has no tag {missing[0]}{did_you_mean(missing[0], labels.tags)}")
    others = [tag for tag in labels.tags if tag not in args.words]
    write_labels(path, replace(labels, tags=others if args.remove else [*others, *dict.fromkeys(args.words)]))


def _note(args: Namespace) -> None:
    path, _ = _find(args.run, args)
    write_labels(path, replace(read_labels(path), note=args.text))


def _archive(args: Namespace) -> None:
    for path in [_find(text, args)[0] for text in args.runs]:
        if is_sweep(path.parent):
            raise InputError(f"{path} is a job; archive its sweep, {path.parent}")
        write_labels(path, replace(read_labels(path), archived=not args.restore))


def _stop(args: Namespace) -> None:
    path, folder = _find(args.run, args)
    owner = _living_owner(path)
    if owner is None:
        queued = "; cancel its job in the queue" if "queued" in _states(path) else ""
        raise InputError(f"{path} is not in progress ({listing.read_row(path, folder).state}){queued}")
    if not owner.is_here or owner.pid is None:
        raise InputError(f"{path} runs on {owner.host}; log in there and type: python -m runner runs stop {path}")
    if not owner.is_owner:
        raise InputError(f"{path}: its lock file and process {owner.pid} belong to different users; stop it yourself")
    jobs = read_ledger(path.parent) if is_sweep(path.parent) and _living_owner(path.parent) else []
    job = next((job for job in jobs if job.directory == path), None)
    if job is not None and job.stop_requested:
        raise InputError(f"{path} is stopping already; `runs stop {path.parent}` stops its sweep")
    try:
        if job is not None:  # its sweep continues with the next job
            write_state(path.parent, job.number, STOPPING)
        os.kill(owner.pid, signal.SIGTERM)
    except OSError as error:
        raise InputError(f"process {owner.pid} of {path} cannot be signaled: {error.strerror}") from None
    print(f"sent SIGTERM to process {owner.pid}: {path} saves a checkpoint after the current step, and ends")


def _delete(args: Namespace) -> None:
    found = dict.fromkeys(_find(text, args) for text in args.runs)
    for path, _ in found:
        if is_sweep(path.parent):
            raise InputError(f"{path} is a job, which the ledger of its sweep names; delete the sweep, {path.parent}")
        _check_idle(path)
    rows = [listing.read_row(path, folder) for path, folder in found]
    print(text_table(listing.as_cells(rows)), flush=True)
    if not args.yes:
        total = listing.describe_size(sum(row.size for row in rows))
        what = "this directory" if len(rows) == 1 else f"these {len(rows)} directories"
        try:
            answer = input(f"delete {what} ({total})? [y/N] ")
        except EOFError:
            raise InputError("runs delete: the question has no answer without a terminal; add --yes") from None
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return
    for path, _ in found:
        _remove(path)
        print(f"deleted {path}", flush=True)


def _remove(path: Path) -> None:
    """Lock a run or a sweep, so that no process starts in it, and delete it."""
    with ExitStack() as at_end:
        if is_sweep(path):
            lock_sweep(path)
            at_end.callback(unlock_sweep, path)
        else:
            at_end.callback(lock_directory(path).release)
        _check_idle(path, ignored=os.getpid())
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise InputError(f"{error.filename or path} cannot be deleted: {error.strerror or error}") from None


def _check_idle(path: Path, ignored: int | None = None) -> None:
    """Raise InputError if a process other than `ignored` has locked the run, sweep or a job, or if a job is queued."""
    directories = [path, *(job.directory for job in read_ledger(path))] if is_sweep(path) else [path]
    for directory in directories:
        if (owner := _living_owner(directory)) and not (owner.is_here and owner.pid == ignored):
            raise InputError(f"{directory} is in progress (process {owner.pid} on {owner.host}); type runs stop {path}")
    if "queued" in _states(path):
        raise InputError(f"{path} has jobs in a queue; cancel them first")


def _states(path: Path) -> set[str]:
    return {job.state for job in read_ledger(path)} if is_sweep(path) else set()


def _living_owner(directory: Path) -> LockOwner | None:
    owner = find_owner(directory)
    return owner if owner and owner.is_alive else None


def _find(text: str, args: Namespace) -> tuple[Path, Path]:
    """Return the path of the run or sweep that `text` names, and the directory in which names are searched."""
    folder = Path(args.outputs).absolute()
    return listing.find_record(text, folder), folder
