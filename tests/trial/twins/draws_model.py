"""Draw what a run trains: a module with its optimizers and schedules, and callbacks of Lightning."""

import random
from typing import Any

CALLBACKS = "lightning.pytorch.callbacks."
# The training metric with one value per epoch, for each way of logging.
MONITORS = {"step": "own/loss", "epoch": "own/loss", "both": "own/loss_epoch", "metric": "own/metric"}


# How an average of the head is written, and where: names in tests/hpc/strategies/changed_weights.py.
WAYS = [
    "data_in_place", "data_assigned", "data_assigned_and_used", "data_copied", "in_place", "copied", "detached",
    "of_many", "loaded", "loaded_by_assignment", "replaced", "normalized", "clipped", "drawn", "released",
]  # fmt: skip
OUTSIDE_STEPS = [
    "on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end",
    "on_validation_start", "on_validation_epoch_end",
]  # fmt: skip
IN_STEPS = ["on_before_zero_grad", "on_before_backward"]


class Dice(random.Random):
    """A random generator with two more methods."""

    def chance(self, share: float) -> bool:
        return self.random() < share

    def one(self, *values: Any) -> Any:
        return self.choice(values)


def module(dice: Dice, drawn: dict[str, Any], validates: bool, manual: bool, accumulate: int, moves: bool) -> None:
    network = {"_target_": "my_research.drawn.Network"}
    if not moves:
        network |= {"dropout": dice.one(0.0, 0.0, 0.2), "norm": dice.chance(0.3) and can_norm(drawn, accumulate)}
    model: dict[str, Any] = {"_target_": "my_research.drawn.Drawn", "network": network, "manual": manual}
    deepspeed = "deepspeed" in drawn["strategy"]
    model["optimizers"] = [optimizer(dice, deepspeed) for _ in range(2 if manual else 1)]
    model["every"] = dice.one(1, 2) if manual else 1
    for wanted in model["optimizers"]:
        num = dice.one(0, 1, 1, 1, 2)
        wanted["schedulers"] = [scheduler(dice, validates) for _ in range(min(num, 1) if deepspeed else num)]
    model["logs"] = dice.one(None, "step", "epoch", "both", "metric")
    if moves and model["logs"]:
        model["logs"] = "metric"  # the only one that is reduced over ranks, so that callbacks on it agree
    if model["logs"] and not manual and dice.chance(0.1):
        config = {"monitor": MONITORS[model["logs"]], "interval": "epoch"}
        plateau = {"name": "ReduceLROnPlateau", "patience": 0, "threshold": dice.one(0.0, 10.0), "factor": 0.5}
        model["optimizers"][0]["schedulers"] = [{**plateau, "config": config}]
    sharded = drawn["strategy"] != "single"
    model["own_clip"] = sharded or dice.chance(0.3)
    model["keeps"] = not moves and dice.chance(0.3)  # as each rank has its own state
    if sharded or moves:
        model["is_shared"] = True
    if drawn["strategy"] in ("single", "ddp", "fsdp") and dice.chance(0.4):
        is_mixed = "trainer.precision=bf16-mixed" in drawn["words"]  # whose steps have copies that cannot be changed
        hooks = OUTSIDE_STEPS if is_mixed else (*OUTSIDE_STEPS, *IN_STEPS)
        if moves:  # to other micro-batches, of which a step has another number
            hooks = ("on_before_optimizer_step", "on_validation_start", "on_validation_epoch_end")
        model["targets"] = [list(pair) for pair in {(dice.choice(WAYS), dice.choice(hooks)) for _ in range(3)}]
        model["targets"] = sorted(
            [way, hook]
            for way, hook in model["targets"]
            if (hook in OUTSIDE_STEPS or "loaded" not in way)  # FSDP would go on in the step without whole parameters
            # A fresh start notes what its sanity check has released, and a resumed one, which has none, need not.
            and (way != "released" or "validation" not in hook)
        )
        if drawn["strategy"] == "ddp" and any(way == "released" for way, _ in model["targets"]):
            # It becomes trainable after the first step, and no step uses it: a rejection says to type this.
            drawn["words"] += ["+strategy.lightning.find_unused_parameters=true"]
    drawn["model"] = model


def can_norm(drawn: dict[str, Any], accumulate: int) -> bool:
    """Return whether batch norm works: it needs several samples, and does not work with DeepSpeed in bf16 on a CPU."""
    size = drawn["data"]["global_batch_size"] // (drawn["ranks"] * accumulate)
    is_mixed = "deepspeed" in drawn["strategy"] and "trainer.precision=bf16-mixed" in drawn["words"]
    rest = drawn["data"]["sizes"]["train"] % (size * drawn["ranks"])  # of which some rank may have one sample
    has_small_rest = "Stock" in drawn["data"]["_target_"] and 0 < rest < 2 * drawn["ranks"]
    return size > 1 and not has_small_rest and not is_mixed


def optimizer(dice: Dice, deepspeed: bool) -> dict[str, Any]:
    names = ["SGD", "SGD", "Adam", "AdamW", "AdamW", "RMSprop", "NAdam", "Adamax"]
    name = dice.choice(names if deepspeed else [*names, "Adagrad"])
    wanted: dict[str, Any] = {"name": name, "lr": dice.one(0.1, 0.03) if name == "SGD" else 0.01}
    if name == "SGD" and dice.chance(0.7):
        wanted |= {"momentum": 0.9, "nesterov": dice.chance(0.3)}
    if name in ("Adam", "AdamW") and dice.chance(0.3):
        wanted["amsgrad"] = True
    return wanted


def scheduler(dice: Dice, validates: bool) -> dict[str, Any]:
    config: dict[str, Any] = {"interval": dice.one("step", "step", "epoch")}
    if dice.chance(0.2):
        config["frequency"] = dice.one(2, 3)
    plain = [
        {"name": "StepLR", "step_size": dice.one(1, 3), "gamma": 0.7},
        {"name": "ExponentialLR", "gamma": 0.9},
        {"name": "CosineAnnealingLR", "T_max": dice.one(7, 20)},
        {"name": "CosineAnnealingWarmRestarts", "T_0": dice.one(3, 5)},
        {"name": "LinearLR", "total_iters": 6},
        {"name": "PolynomialLR", "total_iters": 40},
        {"name": "MultiStepLR", "milestones": [3, 9], "gamma": 0.5},
        {"name": "LambdaLR"},
    ]
    if dice.chance(0.25):
        composed = [
            {"name": "OneCycleLR", "max_lr": 0.1, "total_steps": 200, "cycle_momentum": False},
            {"name": "CyclicLR", "base_lr": 0.001, "max_lr": 0.1, "step_size_up": 3, "cycle_momentum": False},
            {"name": "SequentialLR", "parts": dice.sample(plain, 2), "milestones": [dice.one(2, 5)]},
            {"name": "ChainedScheduler", "parts": dice.sample(plain, 2)},
        ]
        return {**dice.choice(composed), "config": config}
    if validates and dice.chance(0.15):
        config = {"interval": "epoch", "monitor": "val/loss", "strict": False}
        return {
            "name": "ReduceLROnPlateau",
            "patience": 0,
            "threshold": dice.one(0.0, 10.0),
            "factor": 0.5,
            "config": config,
        }
    return {**dice.choice(plain), "config": config}


def callbacks(
    dice: Dice, drawn: dict[str, Any], validates: bool, manual: bool, accumulate: int, moves: bool, is_short: bool
) -> None:
    """Draw callbacks.

    Args:
        is_short: the run may end before its first validation. A strict EarlyStopping would then raise an error.
    """
    chosen: dict[str, Any] = {"progress": None, "samples": None, "monitor": None}
    if not dice.chance(0.15):
        chosen["throughput"] = None
    known = {
        "rates": (
            {"_target_": CALLBACKS + "LearningRateMonitor", "logging_interval": dice.one("step", "epoch", None)},
            0.2,
        ),
        "lambda": ({"_target_": "my_research.drawn.lambda_callback"}, 0.1),
        "timer": ({"_target_": CALLBACKS + "Timer", "duration": "00:02:00:00"}, 0.07),
        "summary": ({"_target_": CALLBACKS + "ModelSummary", "max_depth": 2}, 0.05),
        "spikes": ({"_target_": CALLBACKS + "OnExceptionCheckpoint", "dirpath": "${run_dir}/exception"}, 0.002),
        "checkpoint": ({"_target_": CALLBACKS + "ModelCheckpoint", "monitor": "val/loss"}, 0.002),
        "finder": ({"_target_": CALLBACKS + "LearningRateFinder", "num_training_steps": 5}, 0.002),
        "batches": ({"_target_": CALLBACKS + "BatchSizeFinder", "max_trials": 1}, 0.002),
        "pruning": ({"_target_": CALLBACKS + "ModelPruning", "pruning_fn": "l1_unstructured", "amount": 0.1}, 0.002),
    }
    if validates:
        stopping = {"monitor": "val/loss", "patience": dice.one(1, 2, 3), "min_delta": dice.one(0.0, 10.0)}
        stopping |= {"strict": False} if is_short else {}
        known["stop"] = ({"_target_": CALLBACKS + "EarlyStopping", **stopping}, 0.15)
    if drawn["model"]["logs"]:
        stopping = {"monitor": MONITORS[drawn["model"]["logs"]], "patience": 1, "min_delta": dice.one(0.0, 10.0)}
        node = {"_target_": CALLBACKS + "EarlyStopping", **stopping, "check_on_train_epoch_end": True}
        known["stop_training"] = (node, 0.07)
    if not moves and drawn["strategy"] in ("single", "ddp"):
        swa = {"swa_lrs": 0.01, "swa_epoch_start": dice.one(1, 0.5), "annealing_epochs": dice.one(1, 2)}
        # Its schedule depends on `max_epochs`: a run that starts with fewer epochs differs even after an extension.
        has_norm = drawn["model"]["network"].get("norm")  # rejected
        fewer = any("max_epochs" in word for word in drawn["first_words"])
        known["swa"] = (
            {"_target_": CALLBACKS + "StochasticWeightAveraging", **swa},
            0.0 if manual or fewer or has_norm else 0.06,
        )
        ema = {"decay": 0.8, "update_every_n_steps": dice.one(1, 2), "update_starting_at_step": dice.one(None, 5)}
        known["ema"] = ({"_target_": CALLBACKS + "EMAWeightAveraging", **ema}, 0.08)
        known["averaging"] = ({"_target_": "my_research.drawn.weight_averaging"}, 0.04)
    if not manual and accumulate == 1 and not moves and "deepspeed" not in drawn["strategy"]:
        scheduling = {0: 1, 1: dice.one(2, 3), **({2: 1} if dice.chance(0.3) else {})}
        known["accumulation"] = (
            {"_target_": CALLBACKS + "GradientAccumulationScheduler", "scheduling": scheduling},
            0.1,
        )
    first = drawn["model"]["optimizers"][0]
    if not manual and not moves and drawn["strategy"] == "single" and not first["schedulers"]:
        # Schedulers and Adagrad support only the parameter groups that exist when they are created.
        node = {"_target_": CALLBACKS + "BackboneFinetuning", "unfreeze_backbone_at_epoch": dice.one(1, 1, 2)}
        known["finetuning"] = (node, 0.0 if first["name"] == "Adagrad" else 0.25)
    chosen |= {name: node for name, (node, share) in known.items() if dice.chance(share)}
    for name in [name for name in ("swa", "ema", "averaging") if name in chosen][1:]:  # only one may average weights
        del chosen[name]
    drawn["callbacks"] = chosen
