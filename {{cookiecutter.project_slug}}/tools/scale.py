"""Measure how training scales: one job per number of nodes, through submit.py, then a table and a picture of them all.

  python tools/scale.py nodes=1,2,4,8 trainer=ddp                  strong scaling: the global batch is kept
  python tools/scale.py nodes=1,2,4,8 trainer=ddp scaling=weak     weak: the batch per device is, the rate follows it

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

from {{ cookiecutter.package_name }}.hpc import chart, commandline, config, job, measured, preflight, scaling, tries
from {{ cookiecutter.package_name }}.hpc import study as studies
from {{ cookiecutter.package_name }}.hpc.config import PROJECT, Refused
from {{ cookiecutter.package_name }}.hpc.study import Point, Study
from {{ cookiecutter.package_name }}.hpc.tries import Try

GRACE = 600  # seconds over the longest walltime, after which nothing is expected any more
PAUSE = 60  # seconds between two questions to the scheduler, at most
PATIENCE = 600  # seconds for plan.py, which traces a large network once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = "nodes=, scaling=, lr=, steps=, out=, and whatever submit.py takes"
    parser.add_argument("words", nargs="*", metavar="key=value", help=words)
    parser.add_argument("--no-wait", action="store_true", help="submit, show what is there, and leave")
    parser.add_argument("--again", action="store_true", help="submit failed points again, with the code as it is now")
    asked = parser.parse_intermixed_args()
    study = studies.read(asked.words)
    points, cfgs = checked(study)
    folder = place(study, cfgs[0])
    try:
        print("\n".join(told(study, points, cfgs)), flush=True)
        begin(folder, study)
        submit(folder, points, cfgs[0].cluster.scheduler, asked.again)
        found = wait(folder, points, cfgs, asked.no_wait)
    except KeyboardInterrupt:
        print(f"\nthe jobs go on; so does this, with: {command(asked.words)}", file=sys.stderr)
        sys.exit(130)
    sys.exit(conclude(study, folder, found, asked.words))


def checked(study: Study) -> tuple[list[Point], list[DictConfig]]:
    """All points and their configs, each of which would run. Raises `Refused`."""
    first = commandline.compose_overrides(study.first)
    try:
        preflight.rules(first)
    except Refused as refused:
        if refused.key != studies.BATCH:  # told below, for all points at once
            raise
    points = studies.points(study, first)
    cfgs = [commandline.compose_overrides(point.words) for point in points]
    for cfg in cfgs:
        preflight.rules(cfg)
        preflight.submitting(cfg)
    preflight.files(cfgs[0])
    return points, cfgs


def place(study: Study, cfg: DictConfig) -> Path:
    """The study's folder. Raises `Refused` where another one has it."""
    folder = Path(study.out or PROJECT / "runs" / f"scaling_{cfg.name}_{study.digest}").expanduser().absolute()
    note = folder / "study.json"
    if note.exists() and json.loads(note.read_text(encoding="utf-8"))["digest"] != study.digest:
        raise Refused("out", folder, "holds a study that was begun with other words", "another out=, or leave it out")
    if folder.exists() and not note.exists() and any(folder.iterdir()):
        raise Refused("out", folder, "is a new folder, or that of this study", "another out=, or leave it out")
    return folder


def told(study: Study, points: Sequence[Point], cfgs: Sequence[DictConfig]) -> list[str]:
    """What will be submitted and what it may cost."""
    jobs = [job.of(cfg) for cfg in cfgs]
    cells = [["nodes", "devices", "batch", "per device", "lr", "at most"]]
    for point, work in zip(points, jobs, strict=True):
        sizes = [point.nodes, point.devices, point.batch, point.per_device, point.lr]
        cells.append([*map(scaling.digits, sizes), job.clock(work.seconds)])
    cost = f", at most {sum(work.gpu_hours for work in jobs):g} GPU-hours in all" if jobs[0].gpus_per_node else ""
    title = f"{study.scaling} scaling, {study.steps} steps per point{cost}"
    return [title, *scaling.aligned(cells), studies.why(study, points)]


def begin(folder: Path, study: Study) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    note = {"digest": study.digest, "words": study.words, "scaling": study.scaling, "steps": study.steps}
    (folder / "study.json").write_text(json.dumps(note, indent=1), encoding="utf-8")


def submit(folder: Path, points: Sequence[Point], scheduler: str, again: bool) -> None:
    """A job for each point that has none; with `again` also for those that failed. Raises `Refused`."""
    for one in tries.look(folder, points, scheduler):
        if one.state == tries.ABSENT or one.state.word == tries.ABSENT.word or (again and one.failed):
            path = tries.directory(folder, one.point.nodes, again=True)
            print(f"{one.name}: job {hand_over([*one.point.words, f'run_dir={path}'])}, {path}", flush=True)


def hand_over(words: Sequence[str]) -> str:
    """submit.py, as a person types it; the job's number. Ctrl-C does not reach it: it may have queued the job."""
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
    if process.returncode:
        sys.exit(process.returncode)  # it has said why
    return out.split()[0]


def wait(folder: Path, points: Sequence[Point], cfgs: Sequence[DictConfig], no_wait: bool) -> list[Try]:
    """What has become of all points once no job is on its way; or, of those that nothing is heard of, after a limit."""
    limit = GRACE + max(job.of(cfg).seconds for cfg in cfgs)
    begun = changed = time.monotonic()
    said = ""
    while True:
        found = tries.look(folder, points, cfgs[0].cluster.scheduler)
        active, now = [one for one in found if one.state.active], time.monotonic()
        words = ", ".join(f"{one.name} {one.state.word}" for one in found)
        if words != said:
            said, changed = words, now
            print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)
        queued = any(one.state.word == "pending" for one in active)
        if no_wait or not active or (not queued and now - changed > limit):
            return found
        time.sleep(min(max((now - begun) / 10, 1), PAUSE))


def conclude(study: Study, folder: Path, found: Sequence[Try], words: Sequence[str]) -> int:
    """The table and the files, as far as points are done; what is missing. The exit code."""
    done = {one.point.nodes: numbers for one in found if one.run and one.finished and (numbers := measured.read(one.run.path))}
    if done:
        write(study, folder, found, done)
    for one in found:
        if one.failed and one.run:
            print(f"{one.name}: {one.state.word}: {one.state.why}\n  on from its last checkpoint: python submit.py resume={one.run.path}")
        elif one.finished and one.point.nodes not in done:
            print(f"{one.name}: finished, but without curves of perf/ to read")
    if any(one.failed for one in found):
        print(f"afresh, with the code as it is now: {command(words)} --again")
    if any(one.state.active for one in found):
        print(f"the rest, once the jobs have ended: {command(words)}")
    return 0 if len(done) == len(found) or any(one.state.active for one in found) else 1


def write(study: Study, folder: Path, found: Sequence[Try], done: dict[int, measured.Measured]) -> None:
    points = [one.point for one in found]
    plans = {point.nodes: plan(point.words) for point in points if point.nodes in done}
    rows = scaling.rows(points, done, plans)
    cells, notes = scaling.table(rows), [*scaling.legend(study, rows), studies.compared(study, points)]
    print("\n".join([*scaling.aligned(cells), *notes]))
    lines = [*scaling.markdown(cells), "", *(f"- {note}" for note in [*notes, studies.why(study, points)]), ""]
    (folder / "scaling.md").write_text("\n".join(lines), encoding="utf-8")
    (folder / "scaling.csv").write_text(scaling.as_csv(rows), encoding="utf-8")
    chart.png(scaling.charts(study, folder.name, rows), folder / "scaling.png")
    print(f"{folder}/scaling.csv, scaling.md, scaling.png")


def plan(words: Sequence[str]) -> scaling.Plan:
    """What plan.py predicts for these words, where it can."""
    command = [sys.executable, str(PROJECT / "plan.py"), *words, "--json"]
    try:
        said = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE).stdout)
        return scaling.Plan(said.get("rate"), (said.get("step") or {}).get("seconds"))
    except (OSError, ValueError, AttributeError, subprocess.TimeoutExpired):
        return scaling.Plan()


def command(words: Sequence[str]) -> str:
    return shlex.join(["python", "tools/scale.py", *words])


if __name__ == "__main__":
    with config.refusals():
        main()
