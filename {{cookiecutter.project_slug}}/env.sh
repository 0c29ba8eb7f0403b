# Activate this project's environment, in bash, for people and jobs alike:   source env.sh
#
# 1. Load the machine's modules: run the lines of `setup` in configs/cluster/$CLUSTER.yaml or, if there is no such file,
#    in src/hpc/jobs/cluster/$CLUSTER.yaml. The default is CLUSTER={{ cookiecutter.cluster }}. Jobs set it to "", as
#    their scripts contain these lines.
# 2. Activate the virtual environment $VENV, by default .venv beside this file. The first time, it is created with
#    ${PYTHON:-python3}, and the versions of constraints.txt are installed. After that nothing is installed and the
#    network is not used, until pyproject.toml or constraints.txt changes.
#
# The environment holds libraries only. train.py imports the sources beside itself, so several copies of the project,
# such as a git worktree or the copy of a queued job, can share an environment. For a notebook, set PYTHONPATH=src or
# run `pip install -e .` once.

_env_print() { printf 'env.sh: %s\n' "$*" >&2; }

# Python code that prints the requirements: the dependencies of pyproject.toml, with all extras.
_env_requirements='
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], *sum(project["optional-dependencies"].values(), []), sep="\n")
'

# Print the lines of a cluster's `setup`. There may be no Python yet to parse YAML, so awk reads a list of `- line`,
# quoted or not. Any other form makes it exit with 3.
_env_setup_lines() {
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

# Take a lock that works on every file system: creating a directory succeeds only once. It contains the name of its
# owner, so that the lock of a process that was killed on this machine can be taken over.
_env_lock() {
    local lock=$1 me=$2 owner waited=0
    until command mkdir -- "$lock" 2>/dev/null; do
        if [ ! -d "$lock" ] && [ ! -w "$(dirname -- "$lock")" ]; then
            _env_print "cannot write into the folder of ${lock%.lock}: set VENV to a folder that you can write into"
            return 1
        fi
        _env_take_over "$lock" "$me" && return
        owner=$(cat -- "$lock/owner" 2>/dev/null) || owner=unknown
        [ "$waited" -ne 1 ] || _env_print "waiting for the installation of $owner (if there is none: rm -r '$lock')"
        [ "$waited" -lt 1800 ] || { _env_print "gave up waiting for $owner: rm -r '$lock'"; return 1; }
        waited=$((waited + 1))
        sleep 1
    done
    printf '%s' "$me" >|"$lock/owner"
}

# Take over the lock of a dead owner. Of several processes that find it dead, one creates `heir`, then checks again:
# another process may have taken the lock over, and even released it, in the meantime.
_env_take_over() {
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

# Release the lock. It is renamed before it is removed, so that no process finds half of it.
_env_unlock() {
    [ "$(cat -- "$1/owner" 2>/dev/null)" = "$2" ] && command mv -- "$1" "$1.${2##* }" && command rm -rf -- "$1.${2##* }"
}

# Create the environment, or complete it. It runs in a subshell, which keeps the caller's options, traps and variables.
_env_install() (
    here=$1 venv=$2 marker=$3 checksum=$4 python=${PYTHON:-python3}
    set +eu
    case $venv in *[\"\$\`\\:]* | *$'\n'*) _env_print "the path $venv is not supported: set VENV"; return 1 ;; esac
    command mkdir -p -- "$(dirname -- "$venv")" 2>/dev/null
    # Numbers, as a user in a container may have no name. Process ids are unique only in their namespace.
    me="$(id -u)@$(uname -n) $(readlink /proc/self/ns/pid 2>/dev/null) $BASHPID"
    _env_lock "$venv.lock" "$me" || return 1
    trap '_env_unlock "$venv.lock" "$me"' EXIT
    trap 'exit 1' INT TERM HUP
    [ "$(cat -- "$marker" 2>/dev/null)" != "$checksum" ] || return 0 # another process has installed it

    if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A -- "$venv")" ]; then
        _env_print "$venv exists and is not a virtual environment: set VENV to another folder"
        return 1
    fi
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 && python=$venv/bin/python # it exists already
    if ! "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
        _env_print "Python 3.11 or newer is needed, and '$python' is older or missing: load a module or set PYTHON"
        return 1
    fi
    if [ "$python" != "$venv/bin/python" ] && ! reason=$("$python" -m venv "$venv" 2>&1); then
        _env_print "'$python -m venv' failed (on Debian and Ubuntu: apt install python3-venv): ${reason##*$'\n'}"
        return 1
    fi
    _env_print "installing into $venv (once; takes some minutes)"
    requirements=$("$venv/bin/python" -c "$_env_requirements" "$here/pyproject.toml") || {
        _env_print "$venv/bin/python cannot read $here/pyproject.toml"
        return 1
    }
    cd -- "$here" && printf '%s\n' "$requirements" | "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --requirement /dev/stdin >&2 || {
        _env_print "the installation failed (see above); source env.sh again to continue it"
        return 1
    }
    # Store the signatures of the libraries' classes, so that checking a config does not import these libraries.
    PYTHONPATH=$here/src "$venv/bin/python" -m hpc.config.signatures >&2 || {
        _env_print "storing the libraries' signatures failed (see above)"
        return 1
    }
    printf '%s' "$checksum" >|"$marker"
)

_env_main() {
    local here venv project marker checksum cluster file line setup='' personal marked
    here=$(CDPATH= cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null && pwd) || return 1
    cluster=${CLUSTER-{{ cookiecutter.cluster }}}
    file=configs/cluster/$cluster.yaml
    [ -e "$here/$file" ] || file=src/hpc/jobs/cluster/$cluster.yaml
    if [ -n "$cluster" ] && [ ! -r "$here/$file" ]; then
        _env_print "CLUSTER=$cluster has no file in $here/configs/cluster or $here/src/hpc/jobs/cluster"
        return 1
    fi
    if [ -n "$cluster" ] && ! setup=$(_env_setup_lines "$here/$file"); then
        _env_print "setup in $file must be a list, with one line of bash after each '  - '"
        return 1
    fi
    while read -r line <&3; do
        eval "$line" || { _env_print "a setup line of $file failed: $line"; return 1; }
    done 3<<END
${setup:-}
END
    personal=${XDG_CONFIG_HOME:-${HOME:-}/.config}/hpc-ml-template/clusters.yaml
    if [ -n "$cluster" ] && grep -q "^$cluster:.*setup:\|^  *setup:" -- "$personal" 2>/dev/null; then
        _env_print "note: the setup in $personal runs in jobs only; here the one in $file has run"
    fi
    venv=${VENV:-$here/.venv}
    case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
    project=$(sed -n 's/^name = "\(.*\)"$/\1/p' "$here/pyproject.toml")
    marked=$(cut -d ' ' -f 3- -- "$venv/.complete-$project" 2>/dev/null) || marked=''
    [ -z "$marked" ] || [ ! "$marked" -ef "$venv" ] || venv=$marked # the same folder under another path
    # One marker per project, as projects may share an environment. It holds the path, as environments cannot be moved.
    marker=$venv/.complete-$project
    checksum=$(cat -- "$here/pyproject.toml" "$here/constraints.txt" | cksum) || return 1
    checksum="$checksum $venv"
    if [ "$(cat -- "$marker" 2>/dev/null)" != "$checksum" ]; then
        if [ -e "$marker" ] && [ "$(cut -d ' ' -f 3- -- "$marker")" != "$venv" ]; then
            _env_print "$venv was made as $(cut -d ' ' -f 3- -- "$marker") and cannot be moved: remove it, then source again"
            return 1
        fi
        if [ -n "${SLURM_JOB_ID:-}${PBS_JOBID:-}" ]; then
            _env_print "$venv is not complete for $here, and jobs do not install: source env.sh on a login node"
            return 1
        fi
        _env_install "$here" "$venv" "$marker" "$checksum" || return 1
    fi
    if [ ! -x "$venv/bin/python" ]; then
        _env_print "the Python of $venv is missing: load its module, or remove $venv and source env.sh again"
        return 1
    fi
    # Otherwise each process orders a set of strings differently: labels that are numbered by list(set(names)) would
    # change when a run is resumed.
    export PYTHONHASHSEED=${PYTHONHASHSEED:-0}
    # If it is active already, PATH stays as it is.
    [ "${VIRTUAL_ENV:-}" = "$venv" ] && [ "$(type -P python)" = "$venv/bin/python" ] || source "$venv/bin/activate"
}

if [ -z "${BASH_VERSION:-}" ] || [ "${BASH_SOURCE[0]}" = "$0" ]; then
    echo "env.sh: this file must be sourced, from bash: source env.sh" >&2
    return 1 2>/dev/null || exit 1
fi
if _env_main; then
    unset -f _env_print _env_setup_lines _env_lock _env_take_over _env_is_dead _env_unlock _env_install _env_main
    unset _env_requirements
else
    unset -f _env_print _env_setup_lines _env_lock _env_take_over _env_is_dead _env_unlock _env_install _env_main
    unset _env_requirements
    return 1
fi
