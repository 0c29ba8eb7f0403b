"""Cases that really train a network, with some odd values among valid ones.

The run must train as requested and exit with code 0, or print one sentence and exit with code 2 before the first step.
"""

import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

from trial.hostile import values
from trial.hostile.case import Case, Ground

ENOUGH = 60  # batches after which a run is stopped: it evidently trains
STEPPED = "stepped"  # a file with one byte per trained batch
SMALL = {
    "trainer.max_steps": "2", "+trainer.limit_train_batches": "4", "+trainer.limit_val_batches": "1",
    "+trainer.limit_test_batches": "1", "trainer.log_every_n_steps": "1", "callbacks.progress": "null",
    "callbacks.monitor": "null", "callbacks.samples": "null", "data.global_batch_size": "8",
}  # fmt: skip
MODELS = {
    "digits": {"model.network.depths": "[1]", "model.network.widths": "[8]"},
    "text": {"data": "text", "data.files": "TEXT/*", "data.block_size": "16", "model": "gpt_tiny",
             "model.network.num_layers": "1", "model.network.num_heads": "2", "model.network.width": "8"},
    "images": {"data": "images", "data.dir": "IMAGES", "data.image_size": "8", "data.global_batch_size": "1",
               "data.num_workers": "0", "model": "resnet18", "model.network.depths": "[1]",
               "model.network.widths": "[8]"},
}  # fmt: skip
SECTIONS = {"trainer": 6, "model": 5, "data": 4, "callbacks": 4, "checkpoint": 2, "faults": 2, "strategy": 1.5,
            "logger": 1.5, "": 1.5}  # fmt: skip
ODD: dict[str, list[str]] = {
    "int": ["0", "1", "2", "3", "5", "-1", "-2", "7", "1.5", "0.5", "1.0", "1000", "9" * 30],
    "float": ["0", "0.0", "0.5", "1", "1.0", "-0.5", "-1", "2.5", "1e-9", "1e9", "1e30", "1e400", "nan", "inf", "-inf",
              "-0.0"],
    "bool": ["true", "false", "null", "0", "1", "yes", "'no'", "'false'"],
    "list": ["[]", "[1]", "[2,2]", "[0]", "[-1]", "[1,2,3]", "[0.9,0.9]", "[0.9,1.0]", "[null]", "[a,b]", "[[1]]",
             "[1.5]", "[0.9]", "[8,8]", "[inf,0]"],
    "word": ["null", "''", "' '", "auto", "cpu", "gpu", "mean", "val/loss", "test/loss", "train/loss", "nope", "min",
             "32", "64", "16-mixed", "bf16-mixed", "64-true", "simple", "advanced", "warn", "value", "norm", "batch",
             "group", "00:00:00:01", "1:00:00", "../x", "a/b", "/", ".", "é", "runs"],
    "other": ["{}", "{a: 1}", "{days: 1}", "{seconds: 1}", "{_x_: 1}", "${seed}", "${trainer.max_steps}", "${data}",
              "${trainer}", "${oc.env:HOME}", "${oc.env:NOPE,3}", "${layout:world_size}", "???", "[{a: 1}]"],
}  # fmt: skip


def training(rng: random.Random, ground: Ground) -> Case:
    """Return a case that trains a small run with one to three odd values."""
    model = rng.choice(["digits", "digits", "text", "images"])
    words = SMALL | MODELS[model]
    words = {
        key: value.replace("TEXT", f"{ground.base}/text").replace("IMAGES", f"{ground.base}/images")
        for key, value in words.items()
    }
    known = known_keys(model, [f"{key}={value}" for key, value in words.items()])
    for _ in range(rng.choice([1, 1, 2, 3])):
        [section] = rng.choices(list(SECTIONS), list(SECTIONS.values()))
        key, now = rng.choice([(key, now) for key, now in known.items() if section_of(key) == section])
        for other in (key.lstrip("+"), "+" + key.lstrip("+")):
            words.pop(other, None)
        words[key] = odd(rng, now, ground)
        if key.endswith("num_workers") and len(words[key]) > 3:
            words[key] = "3"  # limit the number of processes
    run_dir = ground.open / "run"
    typed = [f"run_dir={run_dir}", *(f"{key}={value}" for key, value in words.items())]
    return Case("training", typed, inspect="run", run_dir=run_dir)


def sound(ground: Ground, run_dir: Path) -> Case:
    """Return a case that trains a small valid run in this directory, with the node's monitor."""
    from hpc.config.freezing import escape_quotes

    words = {key: value for key, value in (SMALL | MODELS["digits"]).items() if key != "callbacks.monitor"}
    typed = f"run_dir='{escape_quotes(str(run_dir))}'"
    return Case(
        "training", [typed, *(f"{key}={value}" for key, value in words.items())], inspect="run", run_dir=run_dir
    )


def section_of(key: str) -> str:
    name, dot, _ = key.lstrip("+").partition(".")
    return name if dot else ""


def odd(rng: random.Random, now: Any, ground: Ground) -> str:
    """Return a value as typed on the command line, most often of the type of the current value."""
    from hpc.config.freezing import escape_quotes

    kind = {int: "int", float: "float", bool: "bool", list: "list", str: "word"}.get(type(now), "")
    if not kind or rng.random() < 0.2:
        kind = rng.choice(list(ODD))
    if kind in NEAR and rng.random() < 0.6:
        return rng.choice(NEAR[kind])
    if rng.random() < 0.1:
        return "'" + escape_quotes(values.text(rng, ground.canary)) + "'"
    return rng.choice(ODD[kind])


# Plausible values: a run that accepts them must behave accordingly.
NEAR = {
    "int": ["1", "2", "3", "4", "5", "7", "0", "-1"],
    "float": ["0.5", "1", "0.1", "0", "2.5", "1e-9", "1e9"],
    "bool": ["true", "false"],
    "list": ["[0.9,0.9]", "[1,1]", "[8,8]", "[0]", "[8]"],
}
KEYS: dict[str, dict[str, Any]] = {}


def known_keys(model: str, words: list[str]) -> dict[str, Any]:
    """Return the keys that can be overridden: those of the config, and further arguments of its `_target_`s."""
    if model in KEYS:
        return KEYS[model]
    from omegaconf import OmegaConf

    from hpc.config import compose, conversion, signatures, typed_words

    cfg = compose.compose_overrides(words)
    flat = conversion.flatten(cfg)
    known = {key: value for key, value in flat.items() if not typed_words.CODE_KEYS.search(key)}
    nodes = list(signatures.find_targets(OmegaConf.to_container(cfg)))
    signatures.learn(node["_target_"] for _, node in nodes)  # with one import of all
    for name, node in nodes:
        for parameter, kind in signatures.read_signature(node["_target_"]).parameters.items():
            if parameter not in node and f"{name}.{parameter}" not in known:
                example = next((now for word, now in EXAMPLES.items() if word in kind), "")
                known[f"+{name}.{parameter}"] = example
    left_out = ("run_dir", "cluster.", "callbacks.progress", "trainer.default_root_dir", "trainer.devices")
    left_out += ("strategy.lightning.", "model.network.in_channels")  # objects, and a value that fits only one network
    KEYS[model] = {key: value for key, value in known.items() if not key.lstrip("+").startswith(left_out)}
    return KEYS[model]


EXAMPLES: dict[str, Any] = {"bool": True, "float": 0.1, "int": 1, "list": [1], "tuple": [1], "str": "x"}


def enter(project: Path) -> None:
    """Run train.py. Each batch adds a byte to a file. A run that exceeds ENOUGH batches is stopped."""
    import train as program
    from hpc.run import command_line
    from hpc.run.program import rank_process
    from my_research.module import Classifier

    folder = Path.cwd()
    before = Classifier.training_step
    count = 0

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        nonlocal count
        count += 1
        with (folder / STEPPED).open("ab") as file:
            file.write(b".")
        if count > ENOUGH:
            sys.stderr.flush()
            os._exit(0)
        return before(self, batch, batch_idx)

    Classifier.training_step = training_step  # type: ignore[method-assign]

    with rank_process() as this:
        program.train(command_line.compose(program.__doc__, this.arguments), this)


def judged(case: Case, code: int, ground: Ground, said: str) -> str:
    """Return the failure of a training case, or "" if it trained as requested or was rejected in time."""
    steps = (ground.open / STEPPED).stat().st_size if (ground.open / STEPPED).exists() else 0
    if code == 2:
        return "rejected late" if steps else ""
    if steps > ENOUGH:
        return ""
    run_dir = case.run_dir
    events = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    end = events[-1]
    if code == 1:
        return "" if steps and "Traceback" not in said and "was not finite" in said else "exit code"
    return "" if end.get("outcome") == "finished" and not unlike(run_dir, end["step"], steps) else "not as asked"


def unlike(run_dir: Path, step: int, batches: int) -> str:
    """Return the first difference between the run and its config, or ""."""
    from hpc.config import yaml_files

    cfg = yaml_files.load_yaml(run_dir / "config.yaml")
    asked = int(cfg.trainer.max_steps)
    if asked >= 0 and step > asked:
        return f"{step} steps instead of {asked}"
    if step and not math.isclose(batches / step, cfg.trainer.accumulate_grad_batches, rel_tol=0.999):
        return f"{batches} batches in {step} steps"
    return ""
