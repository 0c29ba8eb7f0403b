"""A job as PBS wants it: Job → the script that is submitted, and the script that each of its nodes runs.

For OpenPBS and PBS Professional. There a user cannot requeue, nothing ends a job when one rank fails, pbsdsh returns 0
whatever happened, and what it starts on a node has neither the environment nor the directory of the job. So each node
runs node.sh, which leaves its exit code in a file, and job.sh watches these files.
"""

import re
import shlex
from pathlib import Path

from hpc.config.exit_codes import ExitCode
from hpc.config.walltime import format_walltime
from hpc.jobs.job import HASHES, PYTHON, Job

# Fields that are a directive of their own while they are set. A server without a resource qos rejects it by name.
DIRECTIVES = {"account": "-A {}", "partition": "-q {}", "qos": "-l qos={}", "umask": "-W umask={}"}


def text(job: Job) -> str:
    """job.sh: starts node.sh on each node and ends as the run's verdict says.

    Exit code 0: finished; 85: the next job goes on; 2: could not start; else a failure. The next job is that of a
    chain (afternotok), or this one submits it, as long as starts bring newer checkpoints.
    """
    run_dir = _quote(job.run_dir, f'"$work_dir"/runs/{_quote(job.name)}_"$id"')
    if job.members:
        run_dir = f'$(sed -n "$((${{PBS_ARRAY_INDEX:-0}} + 1))p" {_quote(job.members)})'
    settings = [
        f"umask {job.umask}",
        f"nodes={job.nodes}",
        f"interface={shlex.quote(job.interface or '')}",
        f"to_be_continued={ExitCode.CONTINUE} # exit code",
        f"walltime={job.seconds} retries={job.retries} chain={job.chain}",
        f"work_dir={_quote(job.work_dir)}",
        f"run_dir={run_dir}",
        f"node={_quote(job.members.parent / 'node.sh') if job.members else '$run_dir/node.sh'}",
        _function("setup", *job.setup, *_asking(job)),
        _function("launch", f'exec {job.launcher} /bin/bash "$node" "$@"'),
    ]
    if not (job.run_dir or job.members):  # submitted by hand: nobody has made the run directory
        settings[-3:-3] = [ELSEWHERE]
        settings += [BY_HAND, f"cat >\"$node\" <<'END_OF_NODE'\n{node_text(job)}END_OF_NODE"]
    return "\n".join(["#!/bin/bash", *_directives(job), CHECK, *settings, JOB])


def node_text(job: Job) -> str:
    """node.sh: runs the ranks of one node.

    Arguments: run directory, folder of exit codes, address, port, job, end, where relative paths count from.
    """
    python = [f"export VENV={_quote(job.venv)}"] if job.venv else []
    python += ["CLUSTER='' source \"$code/env.sh\" || return 1  # what the cluster's file sets up is done above"]
    if job.stage_env and job.node_local and job.venv:  # one big file to read instead of many small ones
        python += [f'local here="{job.node_local}/env-$id"']
        python += ['mkdir -p "$here" && tar -xf "$VENV.tar" -C "$here" && export PATH="$here/bin:$PATH"']
    # PBS has set OMP_NUM_THREADS to the cores of the node.
    environment = [f"export OMP_NUM_THREADS={job.cores_per_task or 1} {PYTHON}", HASHES]
    if job.interface:
        environment += [f"export NCCL_SOCKET_IFNAME={job.interface} GLOO_SOCKET_IFNAME={job.interface}"]
    for name, value in job.env.items():  # in double quotes, as a value may name other variables
        environment += [f'export {name}="' + re.sub(r'([\\`"])', r"\\\1", value) + '"']
    arguments = ['resume="$run_dir"'] if job.code else [shlex.quote(argument) for argument in job.arguments]
    ranks = [" ".join(filter(None, ["exec setsid", job.container, 'python -c "$torchrun"']))]
    ranks += [f'--nnodes={job.nodes} --nproc-per-node={job.tasks_per_node} --max-restarts=0 "$@"']
    ranks += [" ".join([f'"$code/{job.program}"', *arguments])]
    settings = [
        f"umask {job.umask}",
        "run_dir=$1 attempt=$2 address=$3 port=$4 id=$5 end=$6 work_dir=$7",
        f"code={'$run_dir/code # as it was when this was submitted' if job.code else '$work_dir'}",
        _function("setup", *job.setup),
        _function("python_environment", *([] if job.container else python)),
        _function("environment", *environment),
        _function("ranks", " \\\n        ".join(ranks)),
    ]
    return "\n".join(["#!/bin/bash", *settings, NODE])


def _directives(job: Job) -> list[str]:
    lines = [f"-N {re.sub(r'[^A-Za-z0-9_.+-]', '_', job.name)[:200]}"]  # qsub rejects other characters
    lines += [form.format(_quote(value)) for field, form in DIRECTIVES.items() if (value := getattr(job, field))]
    memory = f"mem={job.memory_gb}gb" if job.memory_gb else None
    lines += ["-l " + ":".join(filter(None, [f"select={job.nodes}", job.request, job.constraint, memory]))]
    lines += [f"-l place=scatter{':excl' if job.whole_nodes else ''}"]  # else two chunks may lie on one host
    lines += [f"-l walltime={format_walltime(job.seconds)}"]
    if job.num_members > 1:  # qsub rejects 0-0
        lines += [f"-J 0-{job.num_members - 1}" + (f"%{job.at_once}" if job.at_once else "")]
    # The server starts the job again when a node was lost (r). What PBS and the login shell say goes to <job id>.OU, at
    # once where the node sees its folder (d). The job's own words go to a file that job.sh opens: that is always live.
    lines += ["-r y", "-j oe", "-k oed"]
    folder = job.members.parent if job.members else job.run_dir
    if folder and f"{folder}".isascii() and f"{folder}".isprintable():  # qsub takes no other paths, and quotes as bash
        lines += ["-o " + _quote(f"{folder}/")]
    return [f"#PBS {line}" for line in [*lines, *job.options]]


def _asking(job: Job) -> list[str]:
    """A run of a search gets its values once, on the first node, before its ranks start."""
    if not job.asks:
        return []
    env = [] if job.container else [f"export VENV={_quote(job.venv)}", "CLUSTER='' source \"$run_dir/code/env.sh\""]
    python = " ".join(filter(None, [job.container, "python"]))
    ask = " && ".join([*env, f'{python} "$run_dir/code/tools/search.py" --ask "$run_dir"'])
    return [f'[ -e "$run_dir/config.yaml" ] || ({ask}) || exit 2']


def _function(name: str, *lines: str) -> str:
    return "\n".join([f"{name}() {{", *(f"    {line}" for line in lines or [":"]), "}"])


def _quote(path: Path | str | None, otherwise: str = "$PBS_O_WORKDIR") -> str:
    return shlex.quote(str(path)) if path else otherwise


CHECK = r"""
reject() { echo "job.sh: error: $*" >&2; exit 2; }
[ -n "${PBS_JOBID:-}" ] && [ -r "${PBS_NODEFILE:-}" ] || reject "this is no PBS job: start it by qsub, not by bash"
[ $# = 0 ] || reject "words after the script are not used: $*; type them to submit.py"
id=${PBS_JOBID%%[!0-9]*} # of 29[1].server, say
"""

# A script that is submitted by hand: this line becomes the places of the first job in the copy that goes on.
ELSEWHERE = "# The first job runs there; the copy of this script that it makes says where that was."
BY_HAND = rf"""
[ "${{PBS_ENVIRONMENT:-}}" != PBS_INTERACTIVE ] || [ ! -e "$run_dir" ] || [ "$0" -ef "$run_dir/job.sh" ] ||
    reject "this job has a run already; to go on with it: bash $(printf %q "$run_dir/job.sh"); for another one: qsub"
mkdir -p -- "$run_dir"
[ -e "$run_dir/job.sh" ] || # PBS's own copy of this script goes away with the job
    said=$(printf 'work_dir=%q\nrun_dir=%q' "$work_dir" "$run_dir") \
        awk '$0 == "{ELSEWHERE}" {{ $0 = ENVIRON["said"] }} 1' "$0" >"$run_dir/job.sh" || exit 1
"""

JOB = r"""
end=$(($(date +%s) + walltime)) # when PBS ends this job
verdict() { cat -- "$run_dir/verdict" 2>/dev/null; }
newest() { # checkpoint; names sort as their steps do, and one that is not whole ends in .part
    find "$run_dir/checkpoints/" -maxdepth 1 -type d -name 'step-*[0-9]' 2>/dev/null | sort | tail -n 1
}
again="to go on: qsub $(printf %q "$run_dir/job.sh")"
cd -- "$work_dir" && exec >>"$run_dir/job-$id.log" 2>&1 || exit 1 # PBS starts in $HOME
earlier=$(verdict) failed=''
case $(sed -n 's/^outcome //p' <<<"$earlier") in # of the job before this one
finished) echo "job.sh: the run is finished already" && exit 0 ;;
failed) # what was queued before that ends here; a job that somebody submits afterwards is meant to try again
    failed=$(sed -n 's/^attempt //p' <<<"$earlier")
    [ "$chain" -eq 1 ] && [ -z "${HPC_AFTER:-}" ] || [ "$failed" = "${HPC_FAILED:-none}" ] ||
        reject "the run has failed; to try again: rm '$run_dir/verdict' and submit" ;;
esac
outcome() { # of this start; the verdict of the one before stays until an attempt has begun
    [ "$(verdict)" = "$earlier" ] || verdict | sed -n 's/^outcome //p'
}

# The starts in a row that brought no newer checkpoint than they found; a job that a person submitted begins anew.
stalled=0 before=$(newest)
[ -z "${HPC_AFTER:-}" ] || { read -r stalled <"$run_dir/stalled" && echo "job.sh: goes on after job $HPC_AFTER"; }
[[ $stalled =~ ^[0-9]{1,9}$ ]] || stalled=0 # a damaged file; bash would execute what stands in it
stalled=$((10#$stalled + 1))
count() {
    [[ $(newest) > $before ]] && stalled=0
    echo "$stalled" >"$run_dir/stalled"
}
count

next='' lasting='' told='' # the next job, once it is submitted; why it cannot be; this job is told to end
wanted() { # is there still a next job to submit?
    [ "$chain" -eq 1 ] && [ "$stalled" -lt "$retries" ] && [ -z "$next$lasting" ] && [ "$told" != early ]
}
submit_next() {
    wanted || return 0
    # After this job; for a part of an array, which PBS lets nothing wait for, when its ranks are surely gone.
    local after=(-W "depend=afterany:$PBS_JOBID")
    case $PBS_JOBID in *\[*) after=(-a "$(date -d '+2 minutes' +%Y%m%d%H%M.%S)") ;; esac
    next=$(PATH=$PATH:${PBS_O_PATH:-} qsub -v "HPC_AFTER=$id${failed:+,HPC_FAILED=$failed}" "${after[@]}" \
        "$run_dir/job.sh" 2>"$attempt/qsub" | grep -E '^[0-9]+(\[\])?(\.[^ ]+)?$') || next='' # sites print more
    cat -- "$attempt/qsub"
    if [ -n "$next" ]; then
        echo "$(date +%s) $next" >>"$run_dir/successors" # report.py and submit.py resume= ask for it
        echo "job.sh: goes on as job $next"
    else
        # Not so: "cannot connect to server", or "would exceed queue's per-user limit", say.
        local never='bad uid|unauthorized|not found|no such file|illegal|unknown (queue|resource)'
        lasting=$(grep -iE "$never" "$attempt/qsub")
    fi
}

hosts=$(awk '!seen[$0]++' "$PBS_NODEFILE") # a host may have several lines
[ "$(wc -l <<<"$hosts")" -eq "$nodes" ] ||
    reject "asked for $nodes nodes, PBS gave $(paste -sd' ' <<<"$hosts"): each chunk needs a node of its own," \
        "so submit with select=$nodes and place=scatter, as the #PBS lines of this script say"

setup # the launcher may come from a module
address=$(head -n 1 <<<"$hosts") # this host
if [ -n "$interface" ]; then
    address=$(PATH=$PATH:/usr/sbin:/sbin ip -4 -o addr show dev "$interface" | awk '{ print $4; exit }')
    address=${address%/*}
    [ -n "$address" ] || reject "$HOSTNAME has no IPv4 address on interface $interface (ip addr): set cluster.interface"
fi
attempt=$(mktemp -d "$run_dir/.attempt-$id-XXXXXX") || exit 1 # of its own: PBS may start the same job again
trap 'rm -rf -- "$attempt"' EXIT

said=$(wc -c <"$run_dir/job-$id.log")
launch "$run_dir" "$attempt" "$address" $((10000 + RANDOM % 22768)) "$id" "$end" "$work_dir" &
launcher=$! stopping='' ended=0 worst=0 rejected='' saved=''
left=60 # seconds for the codes, when the launcher has ended or the job is to
stop() { # pbsdsh passes TERM on to all nodes and ends; this script stays, as its end would kill the ranks
    stopping=yes
    kill -TERM "$launcher" 2>/dev/null
}
told() { # at the end of the walltime; before, by qdel, or by PBS, which starts it again itself or gives it up
    # The walltime began a little before this script, and PBS looks at its clock late rather than early.
    [ -n "$told" ] || { [ "$(date +%s)" -lt $((end - 15)) ] && told=early || told=late; }
    stop
    count
    # At once: ranks that do not hear are killed in a few seconds, and this script with them.
    submit_next
}
trap told TERM
started() { # has a node begun? NFS shows a folder afresh after a change of one's own
    : >"$attempt/look" && rm -f -- "$attempt/look"
    compgen -G "$attempt/node.*" >/dev/null
}
while [ "$ended" -lt "$nodes" ] && [ "$left" -gt 0 ]; do
    sleep 1
    ended=0
    for file in "$attempt"/rc.*; do
        { read -r code <"$file"; } 2>/dev/null || continue
        ended=$((ended + 1))
        case $code in
        "$to_be_continued") saved=yes ;; # and no failure
        2) rejected=yes ;;&
        *) [ "$code" -le "$worst" ] || worst=$code ;;
        esac
    done
    if [ "$worst" -ne 0 ] && [ -z "$stopping" ]; then # the other nodes would wait for the failed one
        echo "job.sh: a node ended with code $worst, so the others are told to end: see errors/ and node-*-$id.log"
        stop
    fi
    [ "$told" != late ] || [ $((left % 5)) -ne 0 ] || submit_next # if it did not work at once
    [ -z "$stopping$saved" ] && kill -0 "$launcher" 2>/dev/null || left=$((left - 1))
    [ "$left" -gt 50 ] || [ -n "$stopping$saved" ] || started || break # the launcher has failed: nobody to wait for
done
count

worse=''
[ "$worst" -eq 0 ] || worse=", the worst with code $worst"
echo "job.sh: $ended of $nodes nodes ended$worse; the run's verdict is: $(outcome)"
code=$((worst ? worst : 1))
[ -z "$rejected" ] || { echo "job.sh: rejected; what and why is said in node-*-$id.log" && exit 2; }
case $(outcome) in
finished) exit 0 ;;
failed) exit "$code" ;;
continue) code=$to_be_continued ;;
esac
if [ "$ended" -eq 0 ] && [ -z "$told" ] && ! started; then
    wait "$launcher"
    said="ended with code $? and started nothing: $(tail -c "+$((said + 1))" "$run_dir/job-$id.log" | grep -m 1 .)"
    echo "job.sh: error: the launcher (cluster.launcher) $said"
    [ -e "$run_dir/attempts.jsonl" ] || { echo "job.sh: it never worked, so that is all; $again" && exit 1; }
fi
for _ in {1..20}; do # the server may be away for some minutes
    submit_next
    wanted || break
    sleep 15
done
if [ "$told" = early ]; then
    echo "job.sh: told to end before its time: by qdel, or by PBS that lost a node and gives the job up (exit code" \
        "271 either way). If it was not you, queue it again; $again"
elif [ "$chain" -gt 1 ]; then
    echo "job.sh: the next job of the chain goes on; after the last, $again"
elif [ "$stalled" -ge "$retries" ]; then
    echo "job.sh: $stalled starts in a row brought no newer checkpoint, so this is the last; $again"
elif [ -z "$next" ]; then
    echo "job.sh: could not submit the next job from here; $again"
fi
exit "$code"
"""

NODE = r"""
# pbsdsh gives PBS_NODENUM, but under MPICH it is 0 everywhere.
rank=${PALS_NODEID:-${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${PBS_NODENUM:-0}}}}
# pbsdsh starts a task per line of the nodefile: the first one of a host does the work.
mkdir -- "$attempt/node.$rank" 2>/dev/null || { [ -d "$attempt/node.$rank" ]; exit; }
trap 'echo $? >"$attempt/.rc.$rank" && mv -- "$attempt/.rc.$rank" "$attempt/rc.$rank"' EXIT
trap 'exit 143' TERM
exec >>"$run_dir/node-$rank-$id.log" 2>&1 || exit 1 # the pipe that PBS gives breaks when the job is told to end
cd -- "$work_dir" || exit 1
export USER="${USER:-$(id -un 2>/dev/null || id -u)}"
[ -n "$(type -t module)" ] || source /etc/profile
setup
python_environment || exit 1
export HPC_RUN_DIR=$run_dir HPC_JOB_END=$end
environment

# Some sites name GPUs by UUID, on the first node only, or those of all nodes in a file: this node's, as numbers.
uuids=$(echo "${CUDA_VISIBLE_DEVICES:-}" | cat - "${PBS_NODEFILE:-/}.env" 2>/dev/null | grep -oE 'GPU-[0-9a-fA-F-]+')
if [ -n "$uuids" ]; then
    numbers=$(nvidia-smi -L | grep -F "$uuids" | sed -n 's/^GPU \([0-9]*\):.*/\1/p' | paste -sd,)
    [ -n "$numbers" ] || { echo "node.sh: this node has none of the GPUs $uuids" && exit 1; }
    export CUDA_VISIBLE_DEVICES=$numbers
fi

# torchrun in a session of its own gets TERM once, from here: PBS signals whole sessions, pbsdsh does so again, and a
# torchrun interrupted again while its ranks save leaves them. PBS no longer sees it then, so it dies with this script.
# It would end with 1 whatever its ranks end with: the first that failed tells more.
torchrun='import ctypes, runpy, sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
ctypes.CDLL(None).prctl(1, 9)
try:
    runpy.run_module("torch.distributed.run", run_name="__main__")
except ChildFailedError as failed:
    print(failed, file=sys.stderr)
    code = failed.get_first_failure()[1].exitcode
    sys.exit(code if code >= 0 else 128 - code)'
ranks --node-rank="$rank" --master-addr="$address" --master-port="$port" &
pid=$! told=''
trap 'told=yes' TERM
code=143
[ -n "$told" ] || { wait "$pid"; code=$?; } # ends early when TERM comes
if kill -0 "$pid" 2>/dev/null; then
    kill -TERM -- "-$pid" 2>/dev/null || kill -TERM "$pid" # before it has a session of its own
    for _ in {1..45}; do
        kill -0 "$pid" 2>/dev/null && sleep 1
    done
    kill -KILL -- "-$pid" 2>/dev/null
    wait "$pid"
    code=$?
fi
exit "$code"
"""
