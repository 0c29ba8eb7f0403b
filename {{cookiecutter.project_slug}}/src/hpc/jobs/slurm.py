"""A job as text for Slurm: one task per device, all of them started by one srun."""

import shlex
from pathlib import Path

from hpc.config.walltime import format_walltime
from hpc.jobs.job import HASHES, PYTHON, Job

# Field -> directive. A field that is None or 0 is not asked for.
DIRECTIVES = {
    "name": "--job-name={}",
    "nodes": "--nodes={}",
    "tasks_per_node": "--ntasks-per-node={}",
    "cores_per_task": "--cpus-per-task={}",
    "request": "{}",
    "account": "--account={}",
    "partition": "--partition={}",
    "qos": "--qos={}",
    "constraint": "--constraint={}",
}


# Slurm's warning, for ranks that do not know by themselves when the job ends: early enough to save, in a short job too.
WARNING = 120  # seconds
LAST_WORDS = 30  # seconds for the other ranks, when one has ended


def text(job: Job) -> str:
    """For sbatch; `bash` runs it too, inside an allocation. Readable from top to bottom.

    Exit code 0: finished, or Slurm will start it again; 2: rejected; else a failure.
    """
    return "\n".join([_head(job), *_directives(job), "", *_surroundings(job), *_asking(job), *_launch(job), END])


def _head(job: Job) -> str:
    nodes = f"{job.nodes} node{'s' * (job.nodes > 1)}"
    ranks = f"{job.nodes * job.tasks_per_node} ranks, {job.tasks_per_node} on each"
    return f"#!/bin/bash\n# {job.name}: {nodes}, {ranks}, one per device. Made by submit.py from the config."


def _directives(job: Job) -> list[str]:
    asked = [flag.format(value) for field, flag in DIRECTIVES.items() if (value := getattr(job, field))]
    if job.request and not job.gpus_per_node:
        asked.remove(job.request)
    if job.whole_nodes:
        asked.append("--exclusive")
    if job.memory_gb is not None:
        asked.append(f"--mem={job.memory_gb}{'G' * bool(job.memory_gb)}")
    asked += [
        f"--time={format_walltime(job.seconds)}",
        f"--signal=USR2@{min(WARNING, job.seconds // 10)}",
        *job.options,
    ]
    if job.members:
        limit = f"%{job.at_once}" if job.at_once else ""
        asked.append(f"--array=0-{job.num_members - 1}{limit}")
    # Requeued under the same number and appended to: a second attempt neither starts a new run nor erases the log.
    log = f"{job.name}-%j.log" if not (job.run_dir or job.members) else _log(job)
    return [f"#SBATCH {option}" for option in [*asked, f"--output={log}", "--open-mode=append", "--requeue"]]


def _log(job: Job) -> str:
    folder = job.members.parent if job.members else job.run_dir
    name = "job-%A_%a.log" if job.members else "job-%j.log"
    text = str(folder).replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}/{name}"'


def _surroundings(job: Job) -> list[str]:
    """From the directives to an environment in which `python` is the right one."""
    lines = [
        "set -eo pipefail  # not -u: the module command of some sites trips over it",
        f"umask {job.umask}",
        ': "${SLURM_JOB_ID:?there is no allocation here: sbatch this file, or run it with bash inside salloc}"',
        '[ $# = 0 ] || { echo "job.sh: error: words after it are not used: $*; type them to submit.py" >&2; exit 2; }',
        "",
        "# Nothing of the shell that submitted this steers the ranks; srun passes on all that is set from here on.",
        "unset RANK WORLD_SIZE LOCAL_RANK NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT PYTHONPATH HPC_JOB_END",
        "export SLURM_EXPORT_ENV=ALL",
        "",
        *_places(job),
        BEGINNING,
        *job.setup,
    ]
    if not job.container:
        lines += [f"export VENV={_quote(job.venv)}"] if job.venv else []
        lines += [f"CLUSTER='' source {_in_code(job, 'env.sh')}  # what the cluster's file sets up is done above"]
    lines += ["", f"export OMP_NUM_THREADS={job.cores_per_task or 1} {PYTHON}", HASHES]
    lines += ["export MASTER_PORT=$((10000 + RANDOM % 20000))  # of this attempt; the address follows from the nodes"]
    if job.interface:
        lines += [f"export NCCL_SOCKET_IFNAME={job.interface} GLOO_SOCKET_IFNAME={job.interface}"]
    lines += [f'export {name}="{value}"' for name, value in job.env.items()]
    return [*lines, "", *_staging(job)]


def _places(job: Job) -> list[str]:
    """Where the run lives, where relative paths count from, Slurm's name for this job, and how a person starts it."""
    number = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.members else "$SLURM_JOB_ID"
    lines = [f"job={number} retries={job.retries}"]
    if folder := job.members.parent if job.members else job.run_dir:
        lines += [f"folder={_quote(folder)}", *ELSEWHERE.strip().splitlines()]
    lines += [f"cd {_quote(job.work_dir)}"] if job.work_dir else []
    if not (job.run_dir or job.members):
        lines += OWN.strip().replace("NAME", job.name).splitlines()
        lines += ['to_go_on="srun python train.py resume=$(printf %q "$run_dir")"  # in an allocation']
        return [*lines, '[ "${ENVIRONMENT:-}" != BATCH ] || to_go_on="scontrol requeue $job"']
    if job.members:
        lines += [f'run_dir=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {_quote(job.members)})']
    else:
        lines += [f"run_dir={_quote(job.run_dir)}"]
    lines += ["code=$run_dir/code  # as it was when this was submitted"]
    return [*lines, 'to_go_on="sbatch $(printf %q "$run_dir/job.sh")"']


def _staging(job: Job) -> list[str]:
    if not _stages(job):
        return []
    # A warning that comes early is not for tar.
    unpack = f'trap "" USR2; mkdir -p "{_staged(job)}" && tar -xf "$VENV.tar" -C "{_staged(job)}"'
    return [
        "# One big file read by each node, instead of many small ones by each rank.",
        f"srun --nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1 bash -c {shlex.quote(unpack)}",
        "",
    ]


def _stages(job: Job) -> bool:
    """submit.py packed the environment. In a container, or for a script given to sbatch, there is none to unpack."""
    return job.stage_env and job.node_local is not None and job.venv is not None


def _staged(job: Job) -> str:
    """Where a node has its copy. For bash on that node: the same words may mean another folder on each."""
    return f"{job.node_local}/env-$SLURM_JOB_ID"


def _asking(job: Job) -> list[str]:
    if not job.asks:
        return []
    python = f"{job.container} python" if job.container else "python"
    ask = f'{python} {_in_code(job, "tools/search.py")} --ask "$run_dir"'
    why = "# A run of a search gets its values once, before its ranks start; requeued, it keeps them."
    return [why, f'[ -e "$run_dir/config.yaml" ] || {ask}', ""]


def _launch(job: Job) -> list[str]:
    cores = [f"--cpus-per-task={job.cores_per_task}"] if job.cores_per_task else []  # Slurm 22.05 to 23.02 inherit none
    options = [f"--nodes={job.nodes}", f"--ntasks-per-node={job.tasks_per_node}", *cores]
    arguments = ['resume="$run_dir"'] if job.code else [shlex.quote(argument) for argument in job.arguments]
    python = f"{job.container} python" if job.container else "python"
    if _stages(job):
        python = "bash -c " + shlex.quote(f'PATH="{_staged(job)}/bin:$PATH" exec python "$@"') + " python"
    program = [python, _in_code(job, job.program), *arguments]
    return [
        *TOLD.strip().splitlines(),
        f"# When one rank has ended, the others have {LAST_WORDS} s to do so by themselves.",
        f"{job.launcher} {' '.join(options)} --kill-on-bad-exit=0 --wait={LAST_WORDS} --label \\",
        f"    {' '.join(program)} &",
    ]


def _in_code(job: Job, name: str) -> str:
    return f'"$code/{name}"' if job.code else name


def _quote(path: Path | None) -> str:
    return shlex.quote(str(path))


ELSEWHERE = r"""
# A copy of this folder has a copy of this script, which would go on with the run here. Slurm runs a copy of its own.
script=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/^ *Command=//p' || true)
[ "${0##*/}" != job.sh ] || script=$(realpath "$0")
if [[ $script = */job.sh && -e ${script%/*}/code && ! $script -ef $folder/job.sh ]]; then
    echo "job $job: error: this script is of the run in $folder, not of the one beside it in ${script%/*};" \
        "that one goes on by: python submit.py resume=$(printf %q "${script%/*}")" >&2
    exit 2
fi
"""

OWN = r"""
# A run directory for each script that runs in this job; the same when Slurm starts the job again.
restart=${SLURM_RESTART_COUNT:-0} script=$(cksum <"$0" || true)
mkdir -p runs
for number in '' -{2..999}; do
    run_dir=$PWD/runs/NAME_$SLURM_JOB_ID$number
    mkdir "$run_dir" 2>/dev/null && break
    { read -r its_restart its_script <"$run_dir/.script"; } 2>/dev/null || continue
    [ "$its_script" != "$script" ] || [ "$its_restart" -ge "$restart" ] || break
done
echo "$restart $script" >"$run_dir/.script"
export HPC_RUN_DIR=$run_dir # in all ranks
"""

BEGINNING = r"""
verdict() { cat "$run_dir/verdict" 2>/dev/null || true; }
earlier='' # verdict of the start before this one, which stays until an attempt of this one has begun
outcome() { [ "$(verdict)" = "$earlier" ] || verdict | sed -n 's/^outcome //p'; }
newest() { # checkpoint; names sort as their steps do, and one that is not whole ends in .part
    find "$run_dir/checkpoints/" -maxdepth 1 -type d -name 'step-*[0-9]' 2>/dev/null | sort | tail -n 1 || true
}
count() { # the starts in a row that brought no newer checkpoint than they found
    [[ $(newest) > $before ]] && stalled=0
    echo "$stalled" >"$run_dir/stalled" || true # even if the disk is full
}
standing() { # of this start with Slurm
    local now='' restarts=" Restarts=${SLURM_RESTART_COUNT:-0} "
    for _ in {1..30}; do # the controller may be away for a while
        now=$(scontrol show job "$job") && break
        sleep 10
    done
    case $now in
    "" | *JobState=RUNNING*"$restarts"*) echo running ;;
    *Reason=TimeLimit*"$restarts"* | *"$restarts"*PreemptTime=[0-9]*) echo cut short ;;
    *"$restarts"*) echo cancelled ;;
    *) echo requeued ;; # by Slurm itself, or this was cut off and goes on elsewhere
    esac
}
stop() {
    echo "job $job: $*; to go on: $to_go_on" >&2
    exit $((status ? status : 1))
}

[ "$(outcome)" != finished ] || { echo "job $job: the run is finished already" && exit 0; }
mkdir -p "$run_dir"
earlier=$(verdict)

stalled=0 before=$(newest) # submitted by hand, a run has all its tries again
[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || read -r stalled <"$run_dir/stalled" || true
[[ $stalled =~ ^[0-9]{1,9}$ ]] || stalled=0 # a damaged file; bash would execute what stands in it
stalled=$((10#$stalled + 1))
count

# When Slurm ends the job, in unix seconds. Before 23.02 it does not say so by itself.
end=${SLURM_JOB_END_TIME:-$(SLURM_TIME_FORMAT=%s squeue -h -j "$job" -o %e || true)}
[[ $end =~ ^[0-9]+$ ]] && export HPC_JOB_END=$end
"""

TOLD = r"""
# Told to end, this script must live on: its end would kill the ranks, which are told, too, and save. When Slurm cuts it
# short, it asks at once to start again: ranks that do not hear are killed soon, and this script with them.
trap 'count; [ "$(standing)" != "cut short" ] || [ "$stalled" -ge "$retries" ] || scontrol requeue "$job" || true' TERM
"""

END = r"""ranks=$!
trap 'kill "$ranks"' INT # Ctrl-C inside salloc
while wait "$ranks"; status=$?; kill -0 "$ranks" 2>/dev/null; do :; done # a signal ends the waiting, not the ranks
count

case $(outcome) in # exit codes do not come through unchanged, so the ranks leave their common verdict in a file
finished) exit 0 ;;
failed) stop "failed (exit code $status); what was asked and why: above and in $run_dir" ;;
*) [ "$status" -ne 2 ] || stop "rejected; what and why is said above" ;; # another job of this run may go on
esac
case $(standing) in
cancelled) stop "cancelled" ;;
requeued) echo "job $job: Slurm starts it again" && exit "$status" ;;
esac
[ "$stalled" -lt "$retries" ] || stop "failed: $stalled starts in a row brought no newer checkpoint (exit code $status)"
echo "job $job: not finished (exit code $status), so it is requeued"
scontrol requeue "$job" && exit 0
stop "not requeued"
"""
