"""Test random hostile input: python tests/drawn_inputs.py --count 2000 --seed 1

It draws command lines, environments and foreign files, and gives them to the programs of a baked project, each in a
process forked from one that has imported the libraries. A program must work, or print one sentence and exit with code
2: no traceback, no hang, nothing executed, nothing written elsewhere, no escape code on the terminal.
"""

import argparse
import contextlib
import gc
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATIENCE = 30.0  # seconds for one case
BASH = shutil.which("bash") or "bash"
MEMORY = 6 * 2**30  # bytes of address space for one case
# Control characters, except line feed, tab and those that a progress bar needs.
RAW = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
SOUND = [
    "trainer.max_steps=3",
    "+trainer.limit_test_batches=1",
    "+trainer.limit_val_batches=1",
    "callbacks.progress=null",
    "checkpoint.every_n_steps=2",
    "callbacks.monitor.every_seconds=1",
    "checkpoint.monitor=null",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--kind", action="append", help="only these")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new case after that")
    parser.add_argument("--project", type=Path, help="a baked project; default: bake one")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds for one case")
    parser.add_argument("--show", action="store_true", help="what each case was, and what it printed")
    parser.add_argument("--patch", default="", help="code that is executed before each case: a negative control")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hostile-") as made:
        place = Path(made).resolve()
        project = prepared(place, asked.project)
        wrong = campaign(asked, place, project)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


def campaign(asked: argparse.Namespace, place: Path, project: Path) -> list[str]:
    import hostile_kinds as kinds

    chosen = asked.kind or list(kinds.KINDS)
    counts: Counter[tuple[str, str]] = Counter()
    wrong, until = [], time.monotonic() + asked.seconds
    for number in range(asked.first, asked.first + asked.count):
        if time.monotonic() > until:
            break
        rng = random.Random(f"{asked.seed}-{number}")
        [kind] = rng.choices(list(kinds.KINDS), [weight for _, weight in kinds.KINDS.values()])
        if kind not in chosen:
            kind = chosen[number % len(chosen)]
        outcome, told = one(kind, rng, place, project, asked.patch, asked.patience, number)
        counts[kind, outcome] += 1
        if asked.show:
            print(f"{number} {kind}: {outcome}\n{told}")
        if outcome not in ("right", "rejected"):
            replay = f"--first {number} --count 1 --seed {asked.seed} --kind '{kind}'"
            wrong.append(f"{outcome}: python tests/drawn_inputs.py {replay}\n{told}")
            print(f"{number} {kind}: {outcome}", flush=True)
    outcomes = sorted({outcome for _, outcome in counts}, key=["right", "rejected", *FAILURES].index)
    for kind in kinds.KINDS:
        if any(counts[kind, outcome] for outcome in outcomes):
            print(f"{kind}: " + ", ".join(f"{counts[kind, outcome]} {outcome}" for outcome in outcomes))
    print(
        f"{sum(counts.values())} inputs: "
        + ", ".join(f"{sum(n for (_, o), n in counts.items() if o == outcome)} {outcome}" for outcome in outcomes)
    )
    return wrong


FAILURES = [
    "traceback",
    "exit code",
    "hung",
    "executed",
    "written outside",
    "escape code",
    "no sentence",
    "damaged script",
    "rejected late",
    "not as asked",
]


def one(
    kind: str, rng: random.Random, place: Path, project: Path, patch: str, patience: float, number: int
) -> tuple[str, str]:
    """Draw, run and judge one case. Return its outcome, and its command with the end of its output."""
    import hostile_ground
    import hostile_kinds as kinds
    import hostile_training

    folder = place / "case"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "open" / "home").mkdir(parents=True)
    (folder / "victim").write_text("precious")
    ground = hostile_ground.Ground(folder, place / "base")
    case = kinds.KINDS[kind][0](rng, ground)
    before = looked_at(place, project)
    code = waited(forked(case, ground, project, patch, number), patience)
    printed = [(folder / name).read_bytes().decode(errors="surrogateescape") for name in ("out", "err")]
    for name in ("out", "err"):
        (folder / name).unlink()
    told = f"  {case.program} {case.words} {case.environ or ''}\n  " + "\n  ".join(
        repr(line) for line in "\n".join(printed).splitlines()[-18:]
    )
    after = looked_at(place, project)
    if ground.canary.exists():
        return "executed", told
    if before != after:
        return "written outside", f"{told}\n  {sorted(set(before.items()) ^ set(after.items()))}"
    if code is None:
        return "hung", told
    if "Traceback (most recent call last)" in printed[1]:
        return "traceback", told
    if raw := [line for text in printed for line in text.split("\n") if RAW.search(line)]:
        return "escape code", f"{told}\n  {raw}"
    if (
        case.inspect == "run"
        and code in (0, 1, 2)
        and (flaw := hostile_training.judged(case, code, ground, "".join(printed)))
    ):
        return flaw, told
    silent = kind == "environment" and not printed[1]  # only one rank prints an error that all ranks see
    if code == 2 and not silent and not re.search(r"ConfigError: |usage: |Nothing was generated", printed[1]):
        return "no sentence", told
    if code not in (0, 2) and case.inspect != "run":
        return "exit code", f"  exit code {code}\n{told}"
    if code == 0 and case.inspect == "bash":
        flaw = script(printed[0], ground, case.scripted, project)
        if before != looked_at(place, project):
            flaw = "written outside"
        if flaw:
            return flaw, f"{told}\n  {case.scripted}\n{printed[0]}"
    return ("right" if code == 0 else "rejected"), told


# Stubs for what a job script starts: scheduler commands and waiting do nothing, and env.sh is not sourced. The common
# *.bash files come from the project, as a script that was only printed has no copy of the code.
STUBS = """
source() { case $1 in /dev/fd/*) builtin source <(cat JOBS) ;; esac; }
sleep() { read -rt 0.01 <>/dev/zero || :; }; module() { :; }
for name in srun scontrol squeue sacct sbatch qsub qstat pbs_tmrsh mpiexec aprun ip; do eval "$name() { :; }"; done
"""


def script(text: str, ground: Any, environ: dict[str, str], project: Path) -> str:
    """Return "" if a job script is valid bash, adds no scheduler option and executes no input, else the failure."""
    file = ground.open / "job.sh"
    file.write_text(text)
    if not text.startswith("#!/bin/bash"):
        return ""  # --cfg, --help
    if subprocess.run([BASH, "-n", str(file)], capture_output=True).returncode or "--uid" in text.replace("\\n", ""):
        return "damaged script"
    jobs = Path(__file__).resolve().parents[1] / "src/hpc/jobs"
    names = ("job", "pbs", "pbs_successor") if "\n#PBS " in text else ("job", "slurm")
    (ground.open / "stubs").write_text(STUBS.replace("JOBS", shlex.join(f"{jobs / name}.bash" for name in names)))
    (ground.open / "nodes").write_text("n1\n")
    sound = {
        "PATH": "/usr/bin:/bin",
        "BASH_ENV": str(ground.open / "stubs"),
        "HOME": str(ground.open / "home"),
        "TMPDIR": str(ground.open),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NUM_NODES": "1",
        "PBS_JOBID": "1.s",
        "PBS_NODEFILE": str(ground.open / "nodes"),
        "PBS_O_WORKDIR": str(ground.open),
    }
    bash = subprocess.Popen(
        [BASH, str(file)],
        env=sound | environ,
        cwd=ground.open,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        bash.wait(1.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(bash.pid, signal.SIGKILL)
    bash.wait()
    return "executed" if ground.canary.exists() else ""


def looked_at(place: Path, project: Path) -> dict[str, tuple[int, ...]]:
    """Return mode, size and time of all files, except those in the folder `open`, which a case may change."""
    seen: dict[str, tuple[int, ...]] = {}
    for top in (place, project):
        for folder, folders, names in os.walk(top):
            if Path(folder) == place / "case":
                folders[:] = [name for name in folders if name != "open"]
            folders[:] = [name for name in folders if name not in ("base", "__pycache__", "out", "err")]
            for name in [*folders, *names]:
                facts = os.lstat(os.path.join(folder, name))
                seen[os.path.join(folder, name)] = (
                    facts.st_mode,
                    facts.st_size,
                    facts.st_mtime_ns if name in names else 0,
                )
    return seen


def forked(case: Any, ground: Any, project: Path, patch: str, number: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(ground.folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        os.environ |= {"HOME": str(ground.open / "home"), "TMPDIR": str(ground.open)}
        for name, value in case.environ.items():
            os.environ[name] = value
        os.chdir(ground.open)
        import hostile_programs

        exec(patch, {"__name__": "patch", "number": number, "folder": ground.folder})
        hostile_programs.enter(case, project)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        if isinstance(ended.code, str):
            sys.stderr.write(ended.code + "\n")
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def waited(pid: int, patience: float) -> int | None:
    """Wait for a process, and kill its process group. Return its exit code, or None if it did not end in time."""
    limit, status = time.monotonic() + patience, None
    while status is None and time.monotonic() < limit:
        done, told = os.waitpid(pid, os.WNOHANG)
        status = told if done else time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
        return None
    return os.waitstatus_to_exitcode(status)


def prepared(place: Path, project: Path | None) -> Path:
    """Prepare a baked project, import its libraries, and make the valid files that cases damage."""
    os.environ |= {"OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": os.devnull, "PYTHONDONTWRITEBYTECODE": "1"}
    for name in [
        name for name in os.environ if name.startswith(("SLURM_", "PBS_", "HPC_", "MASTER_", "PMI", "COLUMNS"))
    ]:
        del os.environ[name]
    if project is None:
        from cookiecutter.main import cookiecutter

        project = Path(
            cookiecutter(str(HERE.parent), no_input=True, output_dir=str(place / "baked"), default_config=True)
        )
    os.environ["HPC_PROJECT"] = str(project)
    sys.path[:0] = [str(project), str(project / "src"), str(HERE)]
    sys.dont_write_bytecode = True
    import hostile_programs

    hostile_programs.prepare(place / "base", project, SOUND)
    gc.collect()
    gc.freeze()  # without this, garbage collection in a child would copy the pages that it shares with this process
    return project


if __name__ == "__main__":
    sys.exit(main())
