"""Draws a run and how it is interrupted, as plain data: draw(seed, number) is always the same.

Not hypothesis: a twin takes seconds, and each must be known by its number alone, whichever others were drawn.
"""

import random
from typing import Any

CALLBACKS = "lightning.pytorch.callbacks."
WARNINGS = ("SIGUSR1", "SIGUSR2", "SIGTERM", "clock")
STRATEGIES = ("ddp", "ddp", "ddp", "fsdp", "fsdp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")
ENDS = ("SIGKILL", "raise", "SIGINT")


class Dice(random.Random):
    """With the two throws that are needed."""

    def chance(self, share: float) -> bool:
        return self.random() < share

    def one(self, *values: Any) -> Any:
        return self.choice(values)


def draw(seed: int, number: int) -> dict[str, Any]:
    """A run. Keys as `twin_runs` reads them; `moves` and `strikes` say what its twin suffers."""
    dice = Dice(f"{seed}-{number}")
    drawn: dict[str, Any] = {"strategy": "single", "ranks": 1, "words": [], "first_words": [], "then_words": []}
    drawn |= {"strikes": [], "moves": [], "tolerance": 0.0}
    if dice.chance(0.25):
        drawn["strategy"] = dice.choice(STRATEGIES)
        drawn["ranks"] = dice.one(2, 2, 2, 4) if drawn["strategy"] == "ddp" else 2
    moves = dice.chance(0.15) and not drawn["strategy"].startswith("deepspeed")
    manual = not moves and drawn["strategy"] == "single" and dice.chance(0.12)
    accumulate = 1 if manual else dice.one(1, 1, 1, 2, 3)
    words = drawn["words"]
    words += precision(dice, drawn, moves)
    steps = data(dice, drawn, accumulate, moves)
    words += [f"trainer.accumulate_grad_batches={accumulate}"]
    batches = limits(dice, drawn, steps, accumulate)
    validates = validation(dice, words, batches)
    words += clipping(dice, manual)
    words += saves(dice, validates)
    module(dice, drawn, validates, manual, accumulate, moves)
    callbacks(dice, drawn, validates, manual, accumulate, moves)
    drawn["strikes"] = [strike(dice, drawn, steps * accumulate) for _ in range(dice.one(1, 1, 2, 2, 3))]
    if moves:
        drawn["moves"] = [move(dice, drawn, accumulate) for _ in drawn["strikes"]]
    return drawn


def precision(dice: Dice, drawn: dict[str, Any], moves: bool) -> list[str]:
    if moves:
        drawn["tolerance"] = 1e-9
        return ["trainer.precision=64-true"]
    known = ["32-true", "32-true", "32-true", "bf16-mixed"]
    return [f"trainer.precision={dice.choice(known if 'deepspeed' in drawn['strategy'] else [*known, '64-true'])}"]


def data(dice: Dice, drawn: dict[str, Any], accumulate: int, moves: bool) -> int:
    """The data module; optimizer steps of an epoch."""
    shares = drawn["ranks"] * accumulate
    size = 12 if moves else shares * dice.one(1, 2, 2, 3)  # 12: for any number of ranks
    steps = dice.randint(3, 8)
    sizes = {
        "train": steps * size + dice.one(0, 0, 1, size - 1),
        "val": dice.randint(3, 14),
        "test": dice.randint(2, 6),
    }
    sizes |= {"other": dice.randint(3, 8)} if dice.chance(0.2) else {}
    drawn["data"] = {"_target_": "my_research.drawn.Data", "sizes": sizes, "global_batch_size": size}
    drawn["data"] |= {"seed": "${seed}", "num_workers": dice.one(0, 0, 0, 0, 1), "noisy": dice.chance(0.2)}
    if dice.chance(0.05):
        drawn["data"] |= {"_target_": "my_research.drawn.Stock", "shuffle": dice.chance(0.7)}
        del drawn["data"]["seed"]
    if dice.chance(0.1):
        drawn["words"].append(f"+trainer.reload_dataloaders_every_n_epochs={dice.one(1, 2)}")
    return steps


def validation(dice: Dice, words: list[str], batches: int) -> bool:
    """When it validates; whether it does so at all."""
    if dice.chance(0.05):
        words.append("+trainer.limit_val_batches=0")
        return False
    if dice.chance(0.25):
        words.append(f"+trainer.limit_val_batches={dice.one(1, 2, 0.5, 1.0)}")
    if dice.chance(0.35):
        interval = dice.one(dice.randint(1, batches), dice.one(0.25, 0.34, 0.5, 1.0))
        words.append(f"+trainer.val_check_interval={interval}")
    elif dice.chance(0.15):
        words += [
            f"+trainer.val_check_interval={dice.randint(2, 2 * batches)}",
            "+trainer.check_val_every_n_epoch=null",
        ]
    elif dice.chance(0.2):
        words.append("+trainer.check_val_every_n_epoch=2")
    if dice.chance(0.4):
        words.append(f"+trainer.num_sanity_val_steps={dice.one(0, 1, -1)}")
    return True


def clipping(dice: Dice, manual: bool) -> list[str]:
    value = "null" if manual else dice.one("null", "null", 0.5, 0.05)
    algorithm = dice.chance(0.1) and value != "null"
    return [f"trainer.gradient_clip_val={value}", *["+trainer.gradient_clip_algorithm=value"] * algorithm]


def limits(dice: Dice, drawn: dict[str, Any], steps: int, accumulate: int) -> int:
    """The end, and how much of an epoch is used: so many batches."""
    batches, words = steps * accumulate, drawn["words"]
    if dice.chance(0.2):
        limit = dice.one(dice.randint(2, batches), 0.5, 0.8)
        words.append(f"+trainer.limit_train_batches={limit}")
        batches = limit if isinstance(limit, int) else int(batches * limit)
        steps = -(-batches // accumulate)
    elif dice.chance(0.03):
        batches = steps = dice.one(1, 2)
        words.append(f"+trainer.overfit_batches={steps}")
    epochs = dice.randint(2, 4)
    words.append(f"trainer.max_epochs={epochs}")
    total = dice.randint(min(4, epochs * steps), epochs * steps)
    if dice.chance(0.35):
        words.append(f"trainer.max_steps={total}")
        if dice.chance(0.4) and total > 2:
            drawn["first_words"] = [f"trainer.max_steps={dice.randint(2, total - 1)}"]
            drawn["then_words"] = [f"trainer.max_steps={total}"]
    elif dice.chance(0.15):
        drawn["first_words"] = [f"trainer.max_epochs={dice.randint(1, epochs - 1)}"]
        drawn["then_words"] = [f"trainer.max_epochs={epochs}"]
    if dice.chance(0.07):
        words.append(f"+trainer.min_epochs={epochs}")
    return batches


def saves(dice: Dice, validates: bool) -> list[str]:
    every, keep = dice.one("null", 1, 2, 3, 5), dice.one(1, 2, 3)
    monitor = "val/loss" if validates and dice.chance(0.7) else "null"
    words = [f"checkpoint.every_n_steps={every}", f"checkpoint.keep={keep}", f"checkpoint.monitor={monitor}"]
    return [*words, f"checkpoint.mode={dice.one('min', 'min', 'max')}", "faults.retries=20"]


def module(dice: Dice, drawn: dict[str, Any], validates: bool, manual: bool, accumulate: int, moves: bool) -> None:
    network = {"_target_": "my_research.drawn.Network"}
    if not moves:
        several = (
            drawn["data"]["global_batch_size"] > drawn["ranks"] * accumulate
        )  # batch norm cannot do with one sample
        network |= {"dropout": dice.one(0.0, 0.0, 0.2), "norm": several and dice.chance(0.25)}
    model: dict[str, Any] = {"_target_": "my_research.drawn.Drawn", "network": network, "manual": manual}
    model["optimizers"] = [optimizer(dice, moves) for _ in range(2 if manual else 1)]
    model["every"] = dice.one(1, 2) if manual else 1
    for wanted in model["optimizers"]:
        wanted["schedulers"] = [scheduler(dice, validates) for _ in range(dice.one(0, 1, 1, 1, 2))]
    model["logs"] = dice.one(None, "step", "epoch", "both", "metric")
    sharded = drawn["strategy"] != "single"
    model["own_clip"] = sharded or dice.chance(0.3)
    if sharded or moves:
        shared = {"_partial_": True, "_target_": "my_research.hpc.training.parallel.parallelize"}
        model["parallelize"] = {**shared, "precision": "${trainer.precision}"}
    drawn["model"] = model


def optimizer(dice: Dice, moves: bool) -> dict[str, Any]:
    name = dice.one("SGD", "SGD", "Adam", "AdamW", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adamax")
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
            {"name": "OneCycleLR", "max_lr": 0.1, "total_steps": 200},
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


def callbacks(dice: Dice, drawn: dict[str, Any], validates: bool, manual: bool, accumulate: int, moves: bool) -> None:
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
        "spikes": ({"_target_": CALLBACKS + "OnExceptionCheckpoint", "dirpath": "${run_dir}/exception"}, 0.02),
        "checkpoint": ({"_target_": CALLBACKS + "ModelCheckpoint", "monitor": "val/loss"}, 0.02),
        "finder": ({"_target_": CALLBACKS + "LearningRateFinder", "num_training_steps": 5}, 0.02),
        "batches": ({"_target_": CALLBACKS + "BatchSizeFinder", "max_trials": 1}, 0.01),
        "pruning": ({"_target_": CALLBACKS + "ModelPruning", "pruning_fn": "l1_unstructured", "amount": 0.1}, 0.02),
    }
    if validates:
        stopping = {"monitor": "val/loss", "patience": dice.one(1, 2, 3), "min_delta": dice.one(0.0, 10.0)}
        known["stop"] = ({"_target_": CALLBACKS + "EarlyStopping", **stopping}, 0.15)
    if not moves and drawn["strategy"] in ("single", "ddp"):
        swa = {"swa_lrs": 0.01, "swa_epoch_start": dice.one(1, 0.5), "annealing_epochs": dice.one(1, 2)}
        known["swa"] = ({"_target_": CALLBACKS + "StochasticWeightAveraging", **swa}, 0.0 if manual else 0.06)
        ema = {"decay": 0.8, "update_every_n_steps": dice.one(1, 2), "update_starting_at_step": dice.one(None, 5)}
        known["ema"] = ({"_target_": CALLBACKS + "EMAWeightAveraging", **ema}, 0.08)
        known["averaging"] = ({"_target_": "my_research.drawn.weight_averaging"}, 0.04)
    if not manual and accumulate == 1 and not moves and "deepspeed" not in drawn["strategy"]:
        scheduling = {0: 1, 1: dice.one(2, 3), **({2: 1} if dice.chance(0.3) else {})}
        known["accumulation"] = (
            {"_target_": CALLBACKS + "GradientAccumulationScheduler", "scheduling": scheduling},
            0.05,
        )
    chosen |= {name: node for name, (node, share) in known.items() if dice.chance(share)}
    drawn["callbacks"] = chosen


def strike(dice: Dice, drawn: dict[str, Any], batches: int) -> dict[str, Any]:
    """What happens where, the how-manieth time a rank comes by there."""
    how = dice.choice(WARNINGS if dice.chance(0.6) else ENDS)
    places = ["training_step"] * 4 + ["validation_step"] + ["on_train_epoch_end"]
    where = dice.choice([*places, *["save"] * 3] if how == "SIGKILL" else places)
    most = {"training_step": 2 * batches, "validation_step": 4, "on_train_epoch_end": 2, "save": 30}[where]
    rank = 0 if how == "clock" else dice.randrange(drawn["ranks"])
    return {"how": how, "where": where, "count": dice.randint(1, most), "rank": rank}


def move(dice: Dice, drawn: dict[str, Any], accumulate: int) -> dict[str, Any]:
    """Other ranks, another strategy, another way of accumulating: the same global batches."""
    ranks, strategy = dice.one(("single", 1), ("ddp", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 4))[::-1]
    shares = [count for count in (1, 2, 3) if 12 % (count * ranks) == 0]
    accumulate = accumulate if dice.chance(0.5) and accumulate in shares else dice.choice(shares)
    words = [f"strategy={strategy}", f"trainer.devices={ranks}", f"trainer.accumulate_grad_batches={accumulate}"]
    return {"ranks": ranks, "words": words}
