"""The command line: composes the arguments into one run or a sweep, starts it, and returns the exit status.

torch is imported only once the arguments are composed, so that --help, --cfg, completion and mistyped names answer at
once.
"""

import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser  # the flags of the installed version of Hydra
from hydra.core.global_hydra import GlobalHydra

from runner.config.command import composing, prepare
from runner.config.compose import explained
from runner.config.custom_dirs import absolute_dirs, add_to_path
from runner.config.diagnostics.import_target import import_torch
from runner.config.resume import Arguments
from runner.distributed.environment import RankInfo, find_rank_info
from runner.errors import InputError, Preempted, describe_system_error, print_messages
from runner.jobs.process_tuning import tune_process
from runner.paths import CONF

FINISHED, FAILED, REFUSED, INTERRUPTED, PREEMPTED = 0, 1, 2, 130, 143


def main() -> int:
    """Run the command of sys.argv and return the exit status."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # as `python -m` does for the console script
    init = "env"
    try:
        if sys.argv[1:2] == ["runs"]:
            from runner.api.run_commands import run_command

            return run_command(sys.argv[2:])
        args = _read_flags()
        line = os.environ.get("COMP_LINE", "")
        if args.shell_completion and "query" in "".join(args.overrides) and re.match(r"\s*\S+\s+runs\s", line):
            from runner.api.run_commands import complete

            print("\n".join(complete(line)))
            return FINISHED
        init = _find_init(args.overrides)
        if args.help:
            from runner.config.help.topics import render_help

            add_to_path(args.config_dirs)
            search_path = [*map(Path, reversed(args.config_dirs)), CONF]
            print(render_help(search_path, args.overrides), end="")
            return FINISHED
        rank_info = find_rank_info(init)
        with composing(args.overrides, args.config_dirs, args.multirun) as arguments:
            if args.cfg or args.info is not None or args.shell_completion or args.hydra_help:
                return _show(args, arguments.overrides)
            return _run(arguments, args.multirun, rank_info)
    except InputError as error:
        return _refuse_on_all_ranks(error.messages, init)
    except Preempted:
        return PREEMPTED
    except KeyboardInterrupt:  # a second Ctrl-C, after the messages of the first one
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        return FINISHED
    except (OSError, RuntimeError) as error:
        if (message := describe_system_error(error)) is None:
            raise
        print_messages([message])
        return FAILED


def _read_flags() -> Namespace:
    """Return the flags and overrides of sys.argv. Raise InputError for flags that do not exist or have no effect."""
    for word in (*sys.argv[1:], os.getcwd()):
        try:
            word.encode()
        except UnicodeEncodeError:
            text = f"{ascii(word)[1:-1]}: a path must be valid UTF-8, because the records contain it; rename it"
            raise InputError(text) from None
    args, unknown = _flag_parser().parse_known_intermixed_args()
    if args.overrides and not args.help and re.fullmatch(r"\w+", args.overrides[0]):
        from runner.api.run_commands import suggest

        if command := suggest(args.overrides):
            raise InputError(f"{' '.join(args.overrides)}: not KEY=VALUE; did you mean {command}?")
    if unknown:
        key, _, value = unknown[0].lstrip("-").partition("=")
        raise InputError(f"{unknown[0]}: no such flag; " + (f"type {key}={value}" if value else "--help lists them"))
    for name in ("config_name", "config_path", "experimental_rerun"):
        if value := getattr(args, name):
            flag = f"--{name.replace('_', '-')}={value}"
            raise InputError(f"{flag}: the main configuration file is fixed; add your options by --config-dir=DIR")
    for directory in args.config_dirs:
        if not os.path.isdir(directory):
            raise InputError(f"--config-dir={directory} is not a directory; name the one with your model/*.yaml")
    args.config_dirs = absolute_dirs(args.config_dirs)
    return args


def _flag_parser() -> ArgumentParser:
    """Return the parser of Hydra's flags and of the runner's own, which raises InputError instead of exiting."""
    # Hydra's own --config-dir accepts one directory, which hides nothing: see runner.config.custom_dirs.
    parser = ArgumentParser(parents=[get_args_parser()], add_help=False, conflict_handler="resolve")
    parser.add_argument("--config-dir", "-cd", action="append", default=[], dest="config_dirs")
    parser.add_argument("--local-rank", "--local_rank", type=int)  # appended by torch.distributed.launch

    def refuse(message: str) -> NoReturn:
        raise InputError(f"{message}; --help lists the flags")

    parser.error = refuse  # type: ignore[method-assign]  # argparse would print the usage in eight lines
    return parser


def _run(arguments: Arguments, multirun: bool, rank_info: RankInfo) -> int:
    if multirun:
        from runner.sweeps.run_sweep import run_sweep

        return run_sweep(arguments, rank_info, sys.orig_argv, tune_process)[1]
    request = prepare(arguments, rank_info, sys.orig_argv)
    from runner.launchers.launch import launch_and_report

    tune_process()
    return launch_and_report(request, rank_info)


def _show(args: Namespace, overrides: list[str]) -> int:
    """Let Hydra answer --cfg, --info, --hydra-help and shell completion."""
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    with explained(overrides):
        if args.cfg:
            hydra.show_cfg("config", overrides, args.cfg, args.package, args.resolve)
        elif args.info is not None:
            hydra.show_info(args.info, "config", overrides)
        elif args.hydra_help:
            hydra.hydra_help("config", get_args_parser(), Namespace(overrides=overrides))
        else:
            hydra.shell_completion("config", overrides)
    return FINISHED


def _find_init(overrides: Sequence[str]) -> str:
    """Return the value of backend.init, needed to report errors on all ranks before a configuration exists."""
    found = [word.partition("=")[2].strip("'\"") for word in overrides if word.startswith("backend.init=")]
    return found[-1] if found else "env"


def _refuse_on_all_ranks(messages: list[str], init: str) -> int:
    """Print the messages once, on rank 0, before any rank exits."""
    has_printed = False
    try:
        rank_info = find_rank_info(init)
        if rank_info.world_size > 1:
            if has_printed := rank_info.rank == 0:  # the ranks agree on its messages, whatever the others have found
                print_messages(messages)
            import_torch()
            from runner.distributed.backend import Backend
            from runner.distributed.rendezvous import join

            world = join(rank_info, Backend(init=init))
            world.consensus.first_error("composed", messages)
            world.shutdown.report_before_exit(lambda: None)
            world.shutdown.close()
            return REFUSED
    except InputError as error:  # the environment describes no valid world
        messages = error.messages
    except Preempted:
        return PREEMPTED
    except TimeoutError:  # the other ranks have not joined
        pass
    if not has_printed:
        print_messages(messages)
    return REFUSED
