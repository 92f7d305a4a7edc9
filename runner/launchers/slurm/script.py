"""The batch script of a Slurm job: what it asks for, and one elastic agent of torchrun on each of its nodes."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.distributed.environment import PORTS

# torchrun hands each of these on to its ranks, which save and end; by default it knows nothing of USR1.
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


@dataclass(frozen=True)
class Resources:
    """What the job asks for; the options of sbatch by their own names, with True for one that takes no value."""

    options: Mapping[str, str | int | bool] = field(default_factory=dict)
    signal_s: int = 120
    parallel_jobs: int | None = None
    join_timeout_s: int = 120
    max_restarts: int = 0


@dataclass(frozen=True)
class Environment:
    """What is made ready on the job's nodes."""

    modules: Sequence[str] = ()
    conda: str | None = None
    venv: str | None = None
    setup: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    prefix: str | None = None


@dataclass(frozen=True)
class Work:
    """One run: its directory, and the words that its command ends in."""

    directory: Path
    overrides: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Which code the job runs."""

    frozen: Path | None = None  # the folder in which it is kept; None: what there is when the job starts
    submitted: Path | None = None  # the file that says what it was when the job was submitted


def render(
    resources: Resources,
    environment: Environment,
    works: Sequence[Work],
    log: Path,
    python: str,
    nproc_per_node: int,
    code: Code,
) -> str:
    """The script. Several works are the tasks of a job array; their log's path may hold sbatch's own %A and %a."""
    lines = ["#!/bin/bash", *_directives(resources, log, len(works)), "", _TRAP]
    lines += _choose(works)
    of_code = ("PYTHONPATH", "PYTHONSAFEPATH") if code.frozen else ("RUNNER_SUBMITTED",)
    names = ("RUNNER_DIRECTORY", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", *environment.variables, *of_code)
    passed = [f'{name}="${name}"' for name in names]
    command = [*([environment.prefix] if environment.prefix else []), "env", *passed, _VISIBLE, shlex.quote(python)]
    lines += [
        _FUNCTIONS.format(
            command=" ".join(command),
            nproc=nproc_per_node,
            join_s=resources.join_timeout_s,
            signals=SIGNALS,
            restarts=resources.max_restarts,
        ),
        _SETUP,
        *_prepare(environment),
        _RUN.format(
            ports=len(PORTS), first_port=PORTS[0], grace_s=_grace_s(resources.signal_s), take_code=_take_code(code)
        ),
    ]
    return "\n".join(lines)


def _grace_s(signal_s: int) -> int:
    """Seconds that ranks have to save in, before they are killed and the job resumes from what they saved last."""
    return max(signal_s - 20, signal_s * 3 // 4)


def _directives(resources: Resources, log: Path, num_works: int) -> list[str]:
    options = {**resources.options, "output": log, "open-mode": "append", "requeue": True}
    options["signal"] = f"B:USR1@{resources.signal_s}"  # to this script alone
    if num_works > 1:
        throttle = f"%{resources.parallel_jobs}" if resources.parallel_jobs else ""
        options["array"] = f"0-{num_works - 1}{throttle}"
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    return [
        f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}") for name, value in given.items()
    ]


def _prepare(environment: Environment) -> list[str]:
    lines = []
    for module in environment.modules:
        lines += _told(f"module load {shlex.quote(module)}")
    if environment.conda:
        lines += ['eval "$(conda shell.bash hook)"', *_told(f"conda activate {shlex.quote(environment.conda)}")]
    if environment.venv:
        activate = Path(environment.venv).expanduser() / "bin" / "activate"
        lines += _told(f"source {_expanding(str(activate))}")
    lines += [f"export {name}={_expanding(value)}" for name, value in environment.variables.items()]
    return [*lines, *environment.setup]


def _told(line: str) -> list[str]:
    """The line, which ends the job where it fails; which one it was is told."""
    return [f"doing={shlex.quote(line)}", f"{line} || exit 1", "doing="]


def _expanding(text: str) -> str:
    """One word of bash, with the values of the node's variables: $HOME, $SLURM_TMPDIR."""
    return '"' + re.sub(r'(["`\\])', r"\\\1", text) + '"'


def _take_code(code: Code) -> str:
    if code.frozen is None:
        return f"export RUNNER_SUBMITTED={shlex.quote(str(code.submitted))}"
    return _FROZEN.format(folder=shlex.quote(str(code.frozen)))


def _choose(works: Sequence[Work]) -> list[str]:
    if len(works) == 1:
        return [f"export RUNNER_DIRECTORY={shlex.quote(str(works[0].directory))}", _words(works[0])]
    lines = ['case "$SLURM_ARRAY_TASK_ID" in']
    for number, work in enumerate(works):
        lines += [f"{number})", f"export RUNNER_DIRECTORY={shlex.quote(str(work.directory))}", _words(work), ";;"]
    return [*lines, "esac"]


def _words(work: Work) -> str:
    return f"overrides=({shlex.join(work.overrides)})"


_TRAP = """\
# Shortly before the time limit, and when preempted: the ranks save and end.
step= told=
trap 'told=yes; [[ -z $step ]] || kill -USR1 "$step" 2>/dev/null' USR1 TERM
"""

# Slurm may confine the job to GPUs by this variable alone.
_VISIBLE = '${CUDA_VISIBLE_DEVICES:+"CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES"}'

_FUNCTIONS = """
# A node's name where it resolves, otherwise the address by which Slurm itself reaches it.
address() {{
    if getent hosts "$1" >/dev/null; then echo "$1"; else
        scontrol show node "$1" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p'
    fi
}}
# Python, told again what a container may keep out.
inside() {{
    exec {command} "$@"
}}
# On each node, torchrun for its ranks.
agent() {{
    inside -m runner.launchers.slurm.agent \\
        --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={nproc} --rdzv-backend=c10d \\
        --rdzv-endpoint="$master:$port" --rdzv-id="$SLURM_JOB_ID" --local-addr="$(address "$SLURMD_NODENAME")" \\
        --rdzv-conf="is_host=$((SLURM_NODEID == 0)),join_timeout={join_s},read_timeout={join_s}" \\
        --max-restarts={restarts} --signals-to-handle={signals} -m runner "$@"
}}
# Slurm's controller may be busy, or just be starting again.
patiently() {{
    for pause in 1 5 20 30; do "$@" && return; sleep "$pause"; done
    "$@"
}}
"""

# Python puts the working directory before PYTHONPATH for -m, and a checkout may be there, unless it is told not to; the
# runner itself puts it behind everything else.
_FROZEN = """\
# The code as it was when the job was submitted, and no other.
code={folder}
if ! damaged=$(cd "$code" && sha256sum --check --quiet SHA256SUMS 2>&1); then
    echo "$damaged"
    why="launcher.code=frozen: the code in $code is not what was kept when the job was submitted: ${{damaged%%$'\\n'*}}"
    (inside -m runner.launchers.slurm.requeue "$RUNNER_DIRECTORY" 1 "" "$why")
    exit 1
fi
export PYTHONPATH="$code/installed:$code/imported${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONSAFEPATH=1"""

_SETUP = r"""# What ends the job before its run has started leaves its reason in result.json too.
unstarted() {
    local status=$? command=$BASH_COMMAND
    [[ $status != 0 ]] || return
    why="the job ended with status $status before its run was started, at: ${doing:-$command}"
    mkdir -p "$RUNNER_DIRECTORY"
    (inside -m runner.launchers.slurm.requeue "$RUNNER_DIRECTORY" "$status" "" "$why") 2>/dev/null
    if [[ ! -s $RUNNER_DIRECTORY/result.json ]]; then  # there was no Python for it
        echo "$why"
        why=${why//[[:cntrl:]]/ }
        why=${why//\\/\\\\}
        printf '{"state": "failed", "error": "%s"}\n' "${why//\"/\\\"}" > "$RUNNER_DIRECTORY/result.json"
    fi
}
trap unstarted EXIT
"""

_RUN = """\
trap - EXIT
master=$(address "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)")
port=$(({first_port} + SLURM_JOB_ID % {ports}))  # one that no other job on the node has
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={grace_s}
export master port
export -f address inside agent
mkdir -p "$RUNNER_DIRECTORY/slurm" && rm -f "$RUNNER_DIRECTORY/slurm/told" && touch "$RUNNER_DIRECTORY/slurm/started"
{take_code}
srun --export=ALL --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \\
    bash -c 'agent "$@"' agent "${{overrides[@]}}" &
step=$!
[[ -z $told ]] || kill -USR1 "$step"
while true; do
    wait "$step"
    status=$?
    kill -0 "$step" 2>/dev/null || break
done
(inside -m runner.launchers.slurm.requeue "$RUNNER_DIRECTORY" "$status" "$told")
status=$?
# 143 asks for another turn; a job that was cancelled meanwhile no longer counts as running.
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
if [[ $status == 143 && $(patiently scontrol --oneliner show job "$job") == *JobState=RUNNING* ]]; then
    echo "job $job goes back into the queue"
    patiently scontrol requeue "$job"
fi
exit "$status"
"""
