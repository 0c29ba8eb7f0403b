"""Measure how training scales: one job per number of nodes, through submit.py, then a table and a picture of them all.

  python tools/scale.py nodes=1,2,4,8 trainer=ddp                  strong scaling: the global batch is kept
  python tools/scale.py nodes=1,2,4,8 trainer=ddp scaling=weak     weak: the samples per device are; the rate follows

It waits for the jobs, and writes scaling.csv, scaling.md and scaling.png. Ctrl-C ends no job: called again with the
same words it goes on where it was, and takes further nodes= into the same study.

  steps=200       optimizer steps per point
  lr=             with scaling=weak: linear (default for SGD), sqrt (for other optimizers), keep
  out=FOLDER      default: below runs/, named after what was typed
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from hpc.charts import chart
from hpc.checkpoint import on_disk
from hpc.config import compose, errors, preflight
from hpc.config.errors import ConfigError
from hpc.config.project import PROJECT
from hpc.jobs import job
from hpc.plan import fit
from hpc.run import directory
from hpc.studies import run_rates, scaling_jobs, scaling_notes, scaling_points, scaling_table
from hpc.studies.scaling_jobs import Try
from hpc.studies.scaling_points import Point, Study
from hpc.submit import scheduler
from hpc.system import home

NOTE = "study.json"  # in the study's folder: what its points have in common
GRACE = 600  # seconds over the longest walltime, after which nothing is expected any more
PAUSE = 60  # seconds between two questions to the scheduler, at most
PATIENCE = 600  # seconds for plan.py, which traces a large network once


def main() -> None:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = "nodes=, scaling=, lr=, steps=, out=, and whatever submit.py takes"
    parser.add_argument("words", nargs="*", metavar="key=value", help=words)
    parser.add_argument("--dry-run", action="store_true", help="print the points and the first job, and write nothing")
    parser.add_argument("--no-wait", action="store_true", help="submit, show what is there, and leave")
    parser.add_argument("--again", action="store_true", help="submit failed points again, with the code as it is now")
    asked = parser.parse_intermixed_args()
    try:
        sys.exit(run(asked))
    except KeyboardInterrupt:
        print(f"\ninterrupted: queued jobs go on, and so does this with\n  {command(asked.words)}", file=sys.stderr)
        sys.exit(130)


def run(asked: argparse.Namespace) -> int:
    """The exit code: 0, done or on its way; 1, a point has failed."""
    study = scaling_points.read(asked.words)
    points, cfgs = checked(study)
    folder = place(study, cfgs[0])
    table = "\n".join(scaling_table.asked(study, points, [job.of(cfg) for cfg in cfgs]))
    if asked.dry_run:
        print(table, flush=True)
        return dry_run([*points[0].words, f"run_dir={scaling_jobs.directory(folder, points[0].nodes, again=True)}"])
    missing = scaling_jobs.missing(folder, points, cfgs[0].cluster.scheduler, asked.again)
    if missing:
        scheduler.find(cfgs[0].cluster.scheduler)
    make(folder, study, cfgs[0])
    print(table, flush=True)
    submit(folder, missing)
    found = wait(folder, points, cfgs, asked.no_wait)
    return conclude(study, folder, found, asked.words)


def checked(study: Study) -> tuple[list[Point], list[DictConfig]]:
    """All points and their configs, each of which would run. Raises `ConfigError`."""
    first = compose.compose_overrides(study.first)
    try:
        preflight.job(first)
    except ConfigError as rejected:
        if rejected.key != scaling_points.BATCH:  # told below, for all points at once
            raise
    points = scaling_points.points(study, first)
    cfgs = [compose.compose_overrides(point.words) for point in points]
    for cfg in cfgs:
        preflight.job(cfg)
    preflight.files(cfgs[0])  # the data of all
    fit.reject_too_big(cfgs[0], points[0].words)  # on more nodes no device holds more
    return points, cfgs


def place(study: Study, first: DictConfig) -> Path:
    """The study's folder, made or to be made. Raises `ConfigError` where there is something else."""
    folder = home.expand(study.out or PROJECT / "runs" / f"scaling_{first.name}_{study.digest}").absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError("out", folder, "is a file", "out=<a new folder>")
    note = folder / NOTE
    known = note.read_text(encoding="utf-8") if note.is_file() else None
    if folder.is_dir() and any(folder.iterdir()) and known != scaling_points.record(study, first):
        rule = "holds something else, or a study of other words or of a config that was changed since"
        raise ConfigError("out", folder, rule, "out=<a new folder>")
    return folder


def make(folder: Path, study: Study, first: DictConfig) -> None:
    """Raise `ConfigError` where one cannot write."""
    try:
        directory.create(folder, first.group_readable)
    except ConfigError as ConfigError:  # of a run_dir that nobody has typed
        raise ConfigError("out", folder, rejected.rule, "out=<a folder>, or make room (files count, too)") from None
    (folder / NOTE).write_text(scaling_points.record(study, first), encoding="utf-8")


def submit(folder: Path, missing: Sequence[Try]) -> None:
    """A job for each of these points. Leaves where submit.py rejects, which says why."""
    for number, one in enumerate(missing):
        words = to_type(folder, one)
        code, job = hand_over(words)
        if code:
            goes_on = "the jobs above are queued; the same command goes on from there"
            print(goes_on if number else "the same command tries again", file=sys.stderr)
            sys.exit(code)
        print(f"{one.name}: job {job}, {words[-1].partition('=')[2]}", flush=True)


def dry_run(words: Sequence[str]) -> int:
    """The job script, as submit.py prints it; its exit code."""
    return subprocess.run([sys.executable, str(PROJECT / "submit.py"), "--dry-run", *words]).returncode


def to_type(folder: Path, one: Try) -> list[str]:
    """For submit.py: the job that was written before, where a full queue, say, rejected it; else a new try."""
    if one.state.word == scaling_jobs.REJECTED and one.run and (one.run.path / "job.sh").exists():
        return [f"resume={one.run.path}"]
    return [*one.point.words, f"run_dir={scaling_jobs.directory(folder, one.point.nodes, again=True)}"]


def hand_over(words: Sequence[str]) -> tuple[int, str]:
    """submit.py's exit code and the job's number. Ctrl-C does not reach it: it may have queued the job."""
    process = subprocess.Popen(
        [sys.executable, str(PROJECT / "submit.py"), "--parsable", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate()
    except KeyboardInterrupt:
        process.communicate()
        raise
    sys.stderr.write(err)
    return process.returncode, next(iter(out.split()), "")


def wait(folder: Path, points: Sequence[Point], cfgs: Sequence[DictConfig], no_wait: bool) -> list[Try]:
    """What has become of all points once no job is on its way; or, of those that nothing is heard of, after a limit."""
    limit = GRACE + max(job.of(cfg).seconds for cfg in cfgs)
    begun = changed = time.monotonic()
    said = ""
    while True:
        found = scaling_jobs.look(folder, points, cfgs[0].cluster.scheduler)
        active, now = [one for one in found if one.state.active], time.monotonic()
        words = ", ".join(one.told for one in found)
        if words != said:
            said, changed = words, now
            print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)
        queued = any(one.state.word == "pending" for one in active)
        if no_wait or not active or (not queued and now - changed > limit):
            return found
        time.sleep(min(max((now - begun) / 10, 1), PAUSE))


def conclude(study: Study, folder: Path, found: Sequence[Try], words: Sequence[str]) -> int:
    """The table and the files, as far as points are done; what is missing, and what to type. The exit code."""
    runs = {one.point.nodes: one.run for one in found if one.run and one.finished}
    done = {nodes: numbers for nodes, run in runs.items() if (numbers := run_rates.read(run.path))}
    if done:
        write(study, folder, found, done)
    for one in found:
        if one.failed and one.run:
            print(f"{one.name} {one.state.word}: {one.state.why}")
            resume = f"python submit.py resume={shlex.quote(str(one.run.path))}"
            kept = on_disk.known(one.run.path)
            print(f"  to go on from its last checkpoint: {resume}" if kept else "  it left no checkpoint to go on from")
        elif one.finished and one.point.nodes not in done:
            print(f"{one.name} finished, but left no curves of perf/ that can be read")
    if any(one.failed for one in found):
        print(f"  to start afresh, with the code as it is now: {command(words)} --again")
    if waits := any(one.state.active for one in found):
        print(f"the rest, once their jobs have ended: {command(words)}")
    return 0 if waits or len(done) == len(found) else 1


def write(study: Study, folder: Path, found: Sequence[Try], done: dict[int, run_rates.Measured]) -> None:
    points = [one.point for one in found]
    plans = {point.nodes: plan(point.words) for point in points if point.nodes in done}
    rows = scaling_table.rows(points, done, plans)
    cells, below = scaling_table.table(rows), scaling_notes.below(study, points, rows)
    print("\n".join([*scaling_table.aligned(cells), *scaling_notes.wrapped(below)]))
    title = f"{study.scaling.capitalize()} scaling, {study.steps} steps: `{' '.join(study.words)}`"
    (folder / "scaling.md").write_text(scaling_table.markdown(title, cells, below), encoding="utf-8")
    (folder / "scaling.csv").write_text(scaling_table.as_csv(rows), encoding="utf-8")
    chart.write_png(scaling_table.charts(study, rows), folder / "scaling.png")
    print(f"{folder}/scaling.csv, scaling.md, scaling.png")


def plan(words: Sequence[str]) -> scaling_table.Plan:
    """What plan.py predicts for these words, where it can."""
    command = [sys.executable, str(PROJECT / "plan.py"), *words, "--json"]
    try:
        said = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE).stdout)
        return scaling_table.Plan(said.get("rate"), (said.get("step") or {}).get("seconds"))
    except (OSError, ValueError, AttributeError, subprocess.TimeoutExpired):
        return scaling_table.Plan()


def command(words: Sequence[str]) -> str:
    return shlex.join(["python", "tools/scale.py", *words])


if __name__ == "__main__":
    with errors.exit_on_config_error():
        main()
