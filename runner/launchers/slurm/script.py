"""The parts of the batch script of a Slurm job, which starts an agent on each of its nodes."""

TRAP = """\
# Slurm sends the signal shortly before the time limit and before a preemption: the ranks save and exit.
step= signaled=
trap 'signaled=yes; [[ -z $step ]] || kill -USR1 "$step" 2>/dev/null' USR1 TERM
"""

# Slurm may confine the job to its GPUs only by this variable.
VISIBLE = '${CUDA_VISIBLE_DEVICES:+"CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES"}'

FUNCTIONS = """
# A node's name if it resolves, otherwise the address that Slurm uses.
address() {{
    if getent hosts "$1" >/dev/null; then echo "$1"; else
        scontrol show node "$1" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p'
    fi
}}
# Python, with the variables that a container may clear.
inside() {{
    exec {command} "$@"
}}
# On each node, the agent of its ranks.
agent() {{
    inside -m runner.launchers.slurm.agent \\
        "$SLURM_NODEID" "$SLURM_JOB_NUM_NODES" {nproc} "$master:$port" {restarts} {join_s} {save_s} "$@"
}}
# Slurm's controller may be busy or restarting.
retry() {{
    for pause in 1 5 20 30; do "$@" && return; sleep "$pause"; done
    "$@"
}}
# Requeue the job if its run was stopped, given the status of the run, and whether a signal has arrived.
end_job() {{
    local status job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
    job=${{job:-$SLURM_JOB_ID}}
    (inside -m runner.launchers.slurm.requeue "$RUNNER_DIRECTORY" "$1" "$2")
    status=$?
    # 143 requests a requeue; the state of a job that was cancelled meanwhile is no longer RUNNING.
    if [[ $status == 143 && $(retry scontrol --oneliner show job "$job") == *JobState=RUNNING* ]]; then
        echo "job $job goes back into the queue"
        retry scontrol requeue "$job"
    fi
    return "$status"
}}
"""

# With -m, Python puts the working directory before PYTHONPATH unless PYTHONSAFEPATH is set, and the working directory
# may be a checkout; the runner itself appends it to the end of sys.path.
FROZEN = """\
# The code as it was when the job was submitted.
export RUNNER_CODE={code}
doing="launcher.code=frozen: $RUNNER_CODE is missing, or has changed since the job was submitted"
[[ $(sha256sum < "$RUNNER_CODE/code.sha256") == {hash}* ]] || exit 1
(cd "$RUNNER_CODE" && sha256sum --quiet --check code.sha256) || exit 1
export PYTHONPATH="$RUNNER_CODE/imported:$RUNNER_CODE/installed${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONSAFEPATH=1
"""

SETUP = r"""# A failure before the start of the run is recorded too, without Python, which may not be available yet.
record_failed_setup() {
    local status=$? command=$BASH_COMMAND
    [[ $status != 0 ]] || return
    why="the job ended with status $status before its run was started, at: ${doing:-$command}"
    echo "$why"
    mkdir -p "$RUNNER_DIRECTORY"
    [[ ! -s $RUNNER_DIRECTORY/result.json ]] || return
    why=${why//[[:cntrl:]]/ }
    why=${why//\\/\\\\}
    printf '{"state": "failed", "error": "%s"}\n' "${why//\"/\\\"}" > "$RUNNER_DIRECTORY/result.json"
}
trap record_failed_setup EXIT
"""

# With elastic_every_steps, the other agents continue when one is lost. --wait=0 replaces the default of the cluster,
# which may be to end them a while after the first one.
CONTINUE = "--no-kill --kill-on-bad-exit=0 --wait=0"
ELASTIC = """\
# As `agent`, which exits with 75 if it loses the rendezvous, on the first node. If that node is lost, and this script
# with it, Slurm keeps the job on the other nodes, and one of them requeues the job.
elastic_agent() {
    local status stopped= first nodes
    trap 'stopped=yes' USR1 TERM  # the agent receives the signal, too
    (agent "$@")
    status=$?
    [[ $SLURM_NODEID != 0 ]] || touch "$RUNNER_DIRECTORY/slurm/ended"
    for _ in {1..60}; do  # Slurm notices a lost node after SlurmdTimeout, 5 minutes by default
        [[ $status == 75 && -z $stopped && ! -e $RUNNER_DIRECTORY/slurm/ended ]] || break
        sleep 10
        read -r first nodes <<< "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format='%B %N')"
        [[ -n $nodes ]] && ! scontrol show hostnames "$nodes" | grep -qxF "$first" || continue
        mkdir "$RUNNER_DIRECTORY/slurm/claimed" 2>/dev/null && end_job "$status" yes
        break
    done
    return "$status"
}
export -f elastic_agent end_job retry
"""

RUN = """\
trap - EXIT  # from here on, the run records its failure itself
master=$(address "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)")
port=$(({first_port} + SLURM_JOB_ID % {ports}))  # jobs on one node have different ids, and so different ports
export master port
export -f inside agent
mkdir -p "$RUNNER_DIRECTORY/slurm" && rm -rf "$RUNNER_DIRECTORY/slurm/"{{stopped,ended,claimed}}
touch "$RUNNER_DIRECTORY/slurm/started"
srun --export=ALL --ntasks-per-node=1 --cpu-bind=none {on_loss} \\
    bash -c '{agent} "$@"' agent "${{overrides[@]}}" &
step=$!
[[ -z $signaled ]] || kill -USR1 "$step"
while true; do
    wait "$step"
    status=$?
    kill -0 "$step" 2>/dev/null || break
done
end_job "$status" "$signaled"
exit $?
"""
