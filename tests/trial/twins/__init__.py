"""Twins: a random run trains without interruption, and again with interruptions and resumes; both must be the same.

`--shrink` reduces a draw to what is needed for the difference and prints that; `--draw FILE` runs a printed draw.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

from trial.campaign import ALL, Campaign, Control, Outcome
from trial.project import TESTS, put, warm
from trial.twins.draws import draw
from trial.twins.pair import pair

# State that a patched program does not restore.
BROKEN = {
    "random numbers": "from hpc.state import randomness; randomness.restore = lambda state: None",
    "position": "from hpc.data import position; position.start_at = lambda trainer, start: None",
    "optimizer": "from hpc.checkpoint.strategy_state import CheckpointMixin\n"
    "CheckpointMixin.load_optimizer_state_dict = lambda *_: None",
}


class Twins(Campaign):
    name, unit = "twins", "twin"
    GOOD, ACCEPTED = ("same", "rejected"), ("same",)
    JOBS = 2
    FLOORS: ClassVar = {ALL: 0.6, "single": 0.6, "ddp": 0.5, "fsdp": 0.4, "deepspeed": 0.3}

    def __init__(self, folder: Path, project: Path | None = None) -> None:
        super().__init__(folder, project)
        prepare(self.project)

    def draw(self, seed: int, number: int) -> dict[str, Any]:
        return draw(seed, number)

    def kind(self, drawn: dict[str, Any]) -> str:
        return drawn["strategy"].partition("_")[0]

    def attempt(self, drawn: dict[str, Any], place: Path, *, patch: str = "") -> Outcome:
        ended = pair(self.project, place, place.name.replace("-", "_"), drawn, patch)
        counts = Counter({f"{name}: {'struck' if came else 'not reached'}": 1 for name, came in ended.strikes})
        return Outcome(ended.kind, ended.said, counts)

    def controls(self) -> Iterator[Control]:
        from trial.twins.cases import PLAIN

        for what, patch in BROKEN.items():
            yield Control(what, patch, [PLAIN], "different", "start 2")

    def simpler(self, drawn: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from simpler(drawn)

    def show(self, drawn: dict[str, Any]) -> str:
        return json.dumps(brief(drawn))


def prepare(project: Path) -> None:
    """Put the drawn module into a baked project, and import what all runs need."""
    put(project, "drawn", "drawn_data", "trace")
    shutil.copy(TESTS / "hpc" / "strategies" / "changed_weights.py", project / "src" / "my_research")
    warm()


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
