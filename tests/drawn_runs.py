"""Compare random runs with interrupted twins: python tests/drawn_runs.py --count 500 --seed 1

A random run trains without interruption, and again with interruptions and resumes: the results must be equal. --only 17
runs the pair of that number. --shrink reduces it to what is needed for the difference and prints that. --draw FILE runs
the printed draw.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cookiecutter.main import cookiecutter
from draws import draw
from forked import die_with_parent
from twin_runs import Outcome, prepare, twin

HERE = Path(__file__).resolve().parent
KINDS = ("same", "different", "hung", "rejected")


def campaign(project: Path, folder: Path, seed: int, numbers: list[int], jobs: int) -> list[tuple[int, Outcome]]:
    """Run these pairs, `jobs` at a time, and print each that differs when it ends."""
    done = []
    with ProcessPoolExecutor(jobs, get_context("fork"), die_with_parent) as pool:
        asked = {
            pool.submit(twin, project, folder / f"{number}", f"twin_{number}", draw(seed, number)): number
            for number in numbers
        }
        for future in as_completed(asked):
            number, outcome = asked[future], future.result()
            done.append((number, outcome))
            print(told(seed, number, outcome), flush=True)
    return sorted(done)


def told(seed: int, number: int, outcome: Outcome) -> str:
    """Return a line about a twin, and, if it failed, also its draw and the command that repeats it."""
    line = f"{number}: {outcome.kind} {outcome.seconds:.1f} s {outcome.said}"
    if outcome.kind not in ("different", "hung"):
        return line
    again = f"python tests/drawn_runs.py --only {number} --seed {seed}"
    return f"{line}\n    {again}\n    {json.dumps(brief(draw(seed, number)))}"


def brief(drawn: dict[str, Any]) -> dict[str, Any]:
    """Return a draw without its empty values."""
    shorter = {key: value for key, value in drawn.items() if value}
    shorter["callbacks"] = {key: value for key, value in drawn["callbacks"].items() if value}
    return shorter


def whole(shorter: dict[str, Any]) -> dict[str, Any]:
    """Return the complete draw, with the empty values that `brief` has removed."""
    empty: dict[str, Any] = {key: [] for key in ("words", "first_words", "then_words", "strikes", "moves")}
    drawn = {**empty, "tolerance": 0.0, **shorter}
    drawn["callbacks"] = dict.fromkeys(("progress", "samples", "monitor", "throughput")) | drawn["callbacks"]
    if (schedule := drawn["callbacks"].get("accumulation")) is not None:  # JSON has turned these keys into strings
        schedule["scheduling"] = {int(epoch): count for epoch, count in schedule["scheduling"].items()}
    return drawn


def shrunk(project: Path, folder: Path, drawn: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the smallest draw that still shows the same kind of failure."""
    kind = twin(project, folder, name, drawn).kind
    smaller = True
    while smaller:
        smaller = False
        for candidate in simpler(drawn):
            if twin(project, folder, name, candidate).kind == kind:
                print(json.dumps(brief(candidate)), flush=True)
                drawn, smaller = candidate, True
                break
    return drawn


def simpler(drawn: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield draws that lack one element. The final limits of an extended run stay, as its reference has them, too."""
    ends = {word.partition("=")[0] for word in drawn["then_words"]}
    for key in ("words", "strikes"):
        for index in range(len(drawn[key])):
            if key == "words" and drawn[key][index].partition("=")[0] in ends:
                continue
            candidate = deepcopy(drawn)
            del candidate[key][index]
            if key == "strikes" and candidate["moves"]:
                del candidate["moves"][index]
            if candidate["strikes"] or candidate["first_words"]:
                yield candidate
    for name in [name for name, node in drawn["callbacks"].items() if node]:
        candidate = deepcopy(drawn)
        del candidate["callbacks"][name]
        yield candidate
    for number, wanted in enumerate(drawn["model"]["optimizers"]):
        for index in range(len(wanted["schedulers"])):
            candidate = deepcopy(drawn)
            del candidate["model"]["optimizers"][number]["schedulers"][index]
            yield candidate
    for key, value in (("noisy", False), ("num_workers", 0)):
        if drawn["data"].get(key):
            yield {**drawn, "data": {**drawn["data"], key: value}}
    if "other" in drawn["data"]["sizes"]:
        yield {**drawn, "data": {**drawn["data"], "sizes": {**drawn["data"]["sizes"], "other": None}}}
    if drawn["model"]["logs"]:
        yield {**drawn, "model": {**drawn["model"], "logs": None}}
    network = {"_target_": drawn["model"]["network"]["_target_"]}
    if drawn["model"]["network"] != network:
        yield {**drawn, "model": {**drawn["model"], "network": network}}


def baked(folder: Path) -> Path:
    """Bake a project with the default answers."""
    template, answers = str(HERE.parent), {"cluster": "local"}
    return Path(
        cookiecutter(template, no_input=True, default_config=True, extra_context=answers, output_dir=str(folder))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first twin")
    parser.add_argument("--only", type=int, nargs="+", help="the twins of these numbers")
    parser.add_argument("--draw", type=Path, help="a draw in JSON, as a failure prints it")
    parser.add_argument("--shrink", action="store_true", help="with --only or --draw")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--project", type=Path, help="a baked project to use, instead of a fresh one")
    asked = parser.parse_args()
    folder, began = Path(tempfile.mkdtemp(prefix="twins")), time.monotonic()
    project = asked.project or baked(folder)
    prepare(project)
    if asked.shrink:
        drawn = whole(json.loads(asked.draw.read_text())) if asked.draw else draw(asked.seed, asked.only[0])
        print(json.dumps(shrunk(project, folder / "shrunk", drawn, f"shrunk_{os.getpid()}"), indent=1))
        return 0
    if asked.draw:
        outcome = twin(project, folder / "drawn", "drawn", whole(json.loads(asked.draw.read_text())))
        print(f"{outcome.kind} {outcome.said}\n{folder}")
        return int(outcome.kind in ("different", "hung"))
    numbers = asked.only or list(range(asked.first, asked.first + asked.count))
    done = campaign(project, folder, asked.seed, numbers, asked.jobs)
    print(
        summary(done),
        f"seed {asked.seed}, {(time.monotonic() - began) / 60:.1f} minutes; the runs are in {folder}",
        sep="\n",
    )
    return int(any(outcome.kind in ("different", "hung") for _, outcome in done))


def summary(done: list[tuple[int, Outcome]]) -> str:
    """Return the count of each kind, the messages of rejected draws, and the numbers of failed ones."""
    counts = Counter(outcome.kind for _, outcome in done)
    lines = [f"{len(done)} twins: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)]
    messages = Counter(outcome.said for _, outcome in done if outcome.kind == "rejected")
    lines += [f"  rejected {count} times: {said}" for said, count in messages.most_common()]
    strikes = [strike for _, outcome in done for strike in outcome.strikes]
    drawn, struck = Counter(name for name, _ in strikes), Counter(name for name, came in strikes if came)
    if drawn:
        lines.append("  struck: " + ", ".join(f"{name} {struck[name]} of {drawn[name]}" for name in sorted(drawn)))
    failed = [str(number) for number, outcome in done if outcome.kind in ("different", "hung")]
    return "\n".join([*lines, *[f"  different or hung: {' '.join(failed)}"] * bool(failed)])


if __name__ == "__main__":
    sys.exit(main())
