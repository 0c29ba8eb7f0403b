"""Queue many runs as one job array: all combinations of a sweep, or the members of a search."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from hpc.run import directory, frozen_config
from hpc.studies import search, sweep
from hpc.submit import array, queue_run
from hpc.submit.hand_over import await_end, hand_over
from hpc.submit.options import Options
from hpc.submit.scripts import describe, text, write


def submit_sweep(words: Sequence[str], *, at_once: int | None, options: Options) -> None:
    """Queue a run for each combination of `key=a,b`. Every config is checked before anything is written."""
    folder = directory.choose(None, "sweep", datetime.now(), {})
    members = sweep.members(words, folder)
    shared = {"members": folder / "members", "num_members": len(members), "at_once": at_once}
    jobs = []
    for cfg, its_words in members:
        queue_run.check(cfg, its_words)
        jobs.append(describe(cfg, **shared))
    sweep.reject_unlike(jobs)
    first, _ = members[0]
    if options.dry_run:
        print(text(jobs[0], first), end="")
        return
    with queue_run.withdrawn_without_room(folder):
        array.begin(first, folder, run_dirs=[Path(cfg.run_dir) for cfg, _ in members], wait=options.wait)
        for cfg, its_words in members:
            run_dir = Path(cfg.run_dir)
            frozen_config.keep(run_dir, cfg, its_words)
            write(describe(cfg, run_dir=run_dir), cfg, run_dir)  # for submit.py resume=, alone
        write(jobs[0], first, folder)
    await_end(hand_over(first, folder, options=options, num_members=len(members)), options)


def submit_search(words: Sequence[str], *, sampler: str, trials: int, at_once: int | None, options: Options) -> None:
    """Queue a search, whose members get their values when they start: here the corners of its space are checked."""
    folder = directory.choose(None, "search", datetime.now(), {})
    corners = search.corners(words, folder)
    for cfg, its_words in corners:
        queue_run.check(cfg, its_words)
    cfgs = [cfg for cfg, _ in corners]
    plan = search.plan(words, cfgs, sampler=sampler, trials=trials)
    shared = {"members": folder / "members", "num_members": trials, "at_once": at_once, "asks": True}
    jobs = [describe(cfg, **shared) for cfg in cfgs]
    sweep.reject_unlike(jobs)
    if options.dry_run:
        print(text(jobs[0], cfgs[0]), end="")
        return
    run_dirs = search.run_dirs(folder, trials)
    with queue_run.withdrawn_without_room(folder):
        array.begin(cfgs[0], folder, run_dirs=run_dirs, wait=options.wait)
        search.save(folder, plan)
        for run_dir in run_dirs:
            write(describe(cfgs[0], run_dir=run_dir), cfgs[0], run_dir)
        write(jobs[0], cfgs[0], folder)
    await_end(hand_over(cfgs[0], folder, options=options, num_members=trials), options)
