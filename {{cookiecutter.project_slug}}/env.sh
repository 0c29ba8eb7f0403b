# The one definition of this project's environment:   source env.sh   (bash; people and jobs alike)
#
# First the modules of the machine: `setup` in configs/cluster/$CLUSTER.yaml or, if that is not there, in
# src/hpc/jobs/cluster/$CLUSTER.yaml, with CLUSTER={{ cookiecutter.cluster }} if it is not set. A job has loaded them by itself and sets
# CLUSTER to nothing.
#
# Then a virtual environment: $VENV if set, else .venv beside this file. The first time it is made, with
# ${PYTHON:-python3}, and the versions of constraints.txt are installed; afterwards nothing is installed and the network
# is not touched, until pyproject.toml or constraints.txt changes.
#
# It holds libraries only. train.py finds the sources beside itself, so several copies of the project (a worktree, the
# copy that a queued job runs from) share an environment and never import each other's code. For a notebook:
# PYTHONPATH=src, or pip install -e . once.

_env_say() { printf 'env.sh: %s\n' "$*" >&2; }

# What is to be installed: pyproject.toml's dependencies with all extras.
_env_requirements='
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], *sum(project["optional-dependencies"].values(), []), sep="\n")
'

# The lines of a cluster's `setup`: a list of `- line` each, quoted or not, for there may be no Python yet to read YAML
# with. What is written otherwise is not passed over in silence.
_env_setup() {
    awk -v quote="'" '
        /^setup:/ {
            on = 1
            sub(/^setup:/, ""); sub(/ #.*/, ""); gsub(/[ \t\r]/, "")
            if ($0 != "" && $0 != "[]" && $0 != "null" && $0 != "~") exit 3
            next
        }
        !on || /^ *(#.*)?\r?$/ { next }
        !/^ *- / { on = 0; next }
        {
            sub(/^ *- +/, ""); sub(/ *\r?$/, "")
            first = substr($0, 1, 1)
            if (first == "\"" || first == quote) {
                sub(/ +#[^"]*$/, "")
                if (length($0) < 2 || substr($0, length($0)) != first) exit 3
                $0 = substr($0, 2, length($0) - 2)
                if (first == quote) gsub(quote quote, quote)
                else { if (/\\[^"\\]/) exit 3; gsub(/\\"/, "\""); gsub(/\\\\/, "\\") }
            } else if (first ~ /[|>&*!]/) exit 3
            else sub(/ +#.*/, "")
            print
        }' "$1"
}

# A lock for file systems of all kinds: making a directory succeeds once. It names its owner, so that what a killed
# process of this user on this machine left behind is taken over.
_env_lock() {
    local lock=$1 me=$2 owner waited=0
    until command mkdir -- "$lock" 2>/dev/null; do
        if [ ! -d "$lock" ] && [ ! -w "$(dirname -- "$lock")" ]; then
            _env_say "cannot write beside ${lock%.lock}: set VENV to a place where you can"
            return 1
        fi
        _env_takes_over "$lock" "$me" && return
        owner=$(cat -- "$lock/owner" 2>/dev/null) || owner=unknown
        [ "$waited" -ne 1 ] || _env_say "waiting for the installation of $owner (if there is none: rm -r '$lock')"
        [ "$waited" -lt 1800 ] || { _env_say "gave up waiting for $owner: rm -r '$lock'"; return 1; }
        waited=$((waited + 1))
        sleep 1
    done
    printf '%s' "$me" >|"$lock/owner"
}

# Is the owner dead, and are we the one that takes its place? Of those who find it dead one makes `heir`, then looks
# again: whoever was faster may have named itself, and even have released the lock, since then.
_env_takes_over() {
    local lock=$1 me=$2 taken=1
    _env_is_dead "$lock" "$me" && command mkdir -- "$lock/heir" 2>/dev/null || return 1
    if _env_is_dead "$lock" "$me"; then
        printf '%s' "$me" >|"$lock/owner.new" && command mv -f -- "$lock/owner.new" "$lock/owner" && taken=0
    fi
    command rmdir -- "$lock/heir" 2>/dev/null
    return "$taken"
}

_env_is_dead() {
    local owner
    owner=$(cat -- "$1/owner" 2>/dev/null)
    [ "${owner% *}" = "${2% *}" ] && ! kill -0 "${owner##* }" 2>/dev/null
}

# Renamed first: while it is emptied, nobody may find half of it.
_env_release() {
    [ "$(cat -- "$1/owner" 2>/dev/null)" = "$2" ] && command mv -- "$1" "$1.${2##* }" && command rm -rf -- "$1.${2##* }"
}

# Make the environment or finish it. Runs in a subshell: options, traps and variables of the caller stay as they are.
_env_install() (
    here=$1 venv=$2 marker=$3 checksum=$4 python=${PYTHON:-python3}
    set +eu
    case $venv in *[\"\$\`\\:]* | *$'\n'*) _env_say "a virtual environment cannot lie in $venv: set VENV"; return 1 ;; esac
    command mkdir -p -- "$(dirname -- "$venv")" 2>/dev/null
    # Numbers, as a user in a container may have no name; those of processes count in their namespace.
    me="$(id -u)@$(uname -n) $(readlink /proc/self/ns/pid 2>/dev/null) $BASHPID"
    _env_lock "$venv.lock" "$me" || return 1
    trap '_env_release "$venv.lock" "$me"' EXIT
    trap 'exit 1' INT TERM HUP
    [ "$(cat -- "$marker" 2>/dev/null)" != "$checksum" ] || return 0 # the other process has done it

    if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A -- "$venv")" ]; then
        _env_say "$venv is there and is no virtual environment: set VENV to another place"
        return 1
    fi
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 && python=$venv/bin/python # begun before, or made by hand
    if ! "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
        _env_say "needs Python 3.11 or newer, '$python' is not: load a module or set PYTHON"
        return 1
    fi
    if [ "$python" != "$venv/bin/python" ] && ! reason=$("$python" -m venv "$venv" 2>&1); then
        _env_say "'$python -m venv' failed (on Debian and Ubuntu: apt install python3-venv): ${reason##*$'\n'}"
        return 1
    fi
    _env_say "installing into $venv (some minutes, once)"
    requirements=$("$venv/bin/python" -c "$_env_requirements" "$here/pyproject.toml") || {
        _env_say "$here/pyproject.toml cannot be read by $venv/bin/python"
        return 1
    }
    cd -- "$here" && printf '%s\n' "$requirements" | "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --requirement /dev/stdin >&2 || {
        _env_say "the installation failed (see above); source env.sh again to go on with it"
        return 1
    }
    # What the libraries' classes accept is read once, so that checking a config imports nothing heavy.
    PYTHONPATH=$here/src "$venv/bin/python" -m hpc.config.signatures >&2 || {
        _env_say "reading the libraries' signatures failed (see above)"
        return 1
    }
    printf '%s' "$checksum" >|"$marker"
)

_env_main() {
    local here venv project marker checksum cluster file line setup='' own made
    here=$(CDPATH= cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null && pwd) || return 1
    cluster=${CLUSTER-{{ cookiecutter.cluster }}}
    file=configs/cluster/$cluster.yaml
    [ -e "$here/$file" ] || file=src/hpc/jobs/cluster/$cluster.yaml
    if [ -n "$cluster" ] && [ ! -r "$here/$file" ]; then
        _env_say "CLUSTER=$cluster is no file of $here/configs/cluster or $here/src/hpc/jobs/cluster"
        return 1
    fi
    if [ -n "$cluster" ] && ! setup=$(_env_setup "$here/$file"); then
        _env_say "setup in $file must be a list with one '  - line' for each line"
        return 1
    fi
    while read -r line <&3; do
        eval "$line" || { _env_say "failed, from $file: $line"; return 1; }
    done 3<<END
${setup:-}
END
    own=${XDG_CONFIG_HOME:-${HOME:-}/.config}/hpc-ml-template/clusters.yaml
    if [ -n "$cluster" ] && grep -q "^$cluster:.*setup:\|^  *setup:" -- "$own" 2>/dev/null; then
        _env_say "setup in $own is for jobs; here only that in $file is run"
    fi
    venv=${VENV:-$here/.venv}
    case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
    project=$(sed -n 's/^name = "\(.*\)"$/\1/p' "$here/pyproject.toml")
    made=$(cut -d ' ' -f 3- -- "$venv/.complete-$project" 2>/dev/null) || made=''
    [ -z "$made" ] || [ ! "$made" -ef "$venv" ] || venv=$made # the same place by another name
    # One mark per project, as projects may share an environment. It names the place, as an environment cannot be moved.
    marker=$venv/.complete-$project
    checksum=$(cat -- "$here/pyproject.toml" "$here/constraints.txt" | cksum) || return 1
    checksum="$checksum $venv"
    if [ "$(cat -- "$marker" 2>/dev/null)" != "$checksum" ]; then
        if [ -e "$marker" ] && [ "$(cut -d ' ' -f 3- -- "$marker")" != "$venv" ]; then
            _env_say "$venv was made as $(cut -d ' ' -f 3- -- "$marker") and cannot be moved: remove it, then source again"
            return 1
        fi
        if [ -n "${SLURM_JOB_ID:-}${PBS_JOBID:-}" ]; then
            _env_say "$venv is not complete for $here, and a job installs nothing: on a login node, source env.sh"
            return 1
        fi
        _env_install "$here" "$venv" "$marker" "$checksum" || return 1
    fi
    if [ ! -x "$venv/bin/python" ]; then
        _env_say "the Python that $venv was made with is gone: load its module, or remove $venv and source again"
        return 1
    fi
    # Python draws the order of sets of words anew in each process: a run that goes on would have other labels where they
    # are numbered by list(set(names)).
    export PYTHONHASHSEED=${PYTHONHASHSEED:-0}
    # Sourced again: nothing to do, and what was put on PATH since then stays.
    [ "${VIRTUAL_ENV:-}" = "$venv" ] && [ "$(type -P python)" = "$venv/bin/python" ] || source "$venv/bin/activate"
}

if [ -z "${BASH_VERSION:-}" ] || [ "${BASH_SOURCE[0]}" = "$0" ]; then
    echo "env.sh: is sourced, from bash: source env.sh" >&2
    return 1 2>/dev/null || exit 1
fi
if _env_main; then
    unset -f _env_say _env_setup _env_lock _env_takes_over _env_is_dead _env_release _env_install _env_main
    unset _env_requirements
else
    unset -f _env_say _env_setup _env_lock _env_takes_over _env_is_dead _env_release _env_install _env_main
    unset _env_requirements
    return 1
fi
