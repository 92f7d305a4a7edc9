"""The entry: what was typed becomes one checked configuration, or a sweep of them, and goes to the launcher.

torch is imported only once there is something to run: --help, --cfg and completion answer at once.
"""

import io
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser  # Hydra's own flags, whatever its version has
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import setup_globals

from runner import CONF
from runner.command import composing, prepare
from runner.config.compose import compose
from runner.config.help.topics import render_help
from runner.config.own_folders import absolute, add_to_path
from runner.config.resume import Typed
from runner.distributed.environment import RankInfo, find_rank_info, started_by_launch
from runner.errors import InputError, Preempted, tell
from runner.launchers.imported import end_imports

FINISHED, FAILED, REFUSED, INTERRUPTED, PREEMPTED = 0, 1, 2, 130, 143


def main() -> int:
    """Run what sys.argv asks for. Returns the exit status."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # the console script finds what `python -m` finds
    init = "env"
    try:
        args, local_rank = _read_flags()
        init = _typed_init(args.overrides)
        if args.help:
            add_to_path(args.config_dirs)
            folders = [*map(Path, reversed(args.config_dirs)), CONF]
            print(render_help(folders, args.overrides), end="", flush=True)
            return FINISHED
        rank_info = started_by_launch(find_rank_info(init), local_rank)
        with composing(args.overrides, args.config_dirs, args.multirun) as typed:
            if args.cfg or args.info is not None or args.shell_completion or args.hydra_help:
                return _ask_hydra(args, typed)
            return _run(typed, args.multirun, rank_info)
    except InputError as error:
        return _refuse_everywhere(error.messages, init)
    except Preempted:
        return PREEMPTED
    except KeyboardInterrupt:  # a second Ctrl-C; what there was to say of it has been said
        return INTERRUPTED
    except BrokenPipeError:  # whoever read what is printed, as `head` does, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its exit
        return FINISHED


def _read_flags() -> tuple[Namespace, int | None]:
    """Hydra's flags, and the --local-rank that torch.distributed.launch appends to every command.

    Raises InputError for those that do not exist, and for those that would do nothing here.
    """
    parser, of_folders = get_args_parser(), ArgumentParser(add_help=False, allow_abbrev=False)

    def refuse(message: str) -> NoReturn:
        raise InputError(f"{message}; --help lists the flags")

    for each in (parser, of_folders):
        each.error = refuse  # type: ignore[method-assign]  # its own prints the usage in eight lines
    # Hydra's own flag takes one folder, and lets it hide nothing: see runner.config.own_folders.
    of_folders.add_argument("--config-dir", "-cd", action="append", default=[], dest="config_dirs")
    own, sys.argv[1:] = of_folders.parse_known_args()
    parser.add_argument("--local-rank", "--local_rank", type=int, default=None)
    args, unknown = parser.parse_known_intermixed_args()
    if unknown:
        key, _, value = unknown[0].lstrip("-").partition("=")
        raise InputError(f"{unknown[0]}: no such flag; " + (f"type {key}={value}" if value else "--help lists them"))
    for name in ("config_name", "config_path", "experimental_rerun"):
        if value := getattr(args, name):
            flag = f"--{name.replace('_', '-')}={value}"
            raise InputError(f"{flag}: the runner has one configuration of its own; type --config-dir=DIR to add yours")
    for folder in own.config_dirs:
        if not os.path.isdir(folder):
            raise InputError(f"--config-dir={folder} is not a folder; name the one with your model/*.yaml")
    args.config_dirs = absolute(own.config_dirs)
    # Hydra reads it too, and knows neither that flag nor overrides on both sides of a flag.
    flags = [word for word in sys.argv[1:] if not word.startswith(("--local-rank", "--local_rank"))]
    for word in args.overrides:
        flags.remove(word)
    sys.argv[1:] = [*args.overrides, *flags]
    return args, args.local_rank


def _run(typed: Typed, multirun: bool, rank_info: RankInfo) -> int:
    if multirun:
        from runner.sweeps.start import run_sweep

        end_imports()
        return run_sweep(typed, rank_info, sys.orig_argv).status
    config, request = prepare(typed, rank_info, sys.orig_argv)
    from runner.launchers.freed_memory import keep_freed_memory
    from runner.launchers.launch import launch_and_tell

    end_imports()
    keep_freed_memory()
    return launch_and_tell(config, request, rank_info)


def _ask_hydra(args: Namespace, typed: Typed) -> int:
    """Let Hydra answer --cfg, --info, --hydra-help and shell completion; it reads sys.argv by itself."""
    sys.argv[1 : 1 + len(args.overrides)] = typed.overrides  # with what the run recorded that resume= or run= names
    composer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    setup_globals()
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(lambda cfg: None)()
    except SystemExit:
        if args.cfg and composer is not None:  # its own report of an error is long and ends with status 1
            GlobalHydra.instance().clear()
            GlobalHydra.instance().initialize(composer)
            compose(typed.overrides)
        sys.stderr.write(said.getvalue())
        raise
    sys.stderr.write(said.getvalue())
    return FINISHED


def _typed_init(overrides: Sequence[str]) -> str:
    """How ranks find each other, as typed: it is needed before there is a configuration, to tell all of them of it."""
    typed = [word.partition("=")[2].strip("'\"") for word in overrides if word.startswith("backend.init=")]
    return typed[-1] if typed else "env"


def _refuse_everywhere(messages: list[str], init: str) -> int:
    """Tell the user once, by rank 0, before any rank exits."""
    try:
        rank_info = find_rank_info(init)
        if rank_info.world_size > 1:
            from runner.distributed.backend import Backend
            from runner.distributed.rendezvous import join

            world = join(rank_info, Backend(init=init))
            agreed = world.agreement.first_error("composed", messages)
            world.ending.say_then_continue(lambda: tell(agreed))
            world.ending.close()
            return REFUSED
    except InputError as error:  # there is no such world
        messages = error.messages
    except Preempted:
        return PREEMPTED
    except TimeoutError:  # the others do not come to where they would be told
        pass
    tell(messages)
    return REFUSED
