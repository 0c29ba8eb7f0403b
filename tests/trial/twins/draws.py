"""Draw a random run and its interruptions, as plain data: draw(seed, number) is always the same.

Hypothesis is not used: a run takes seconds, and each must be reproducible by its number alone.
"""

from typing import Any

from trial.twins.draws_model import Dice, callbacks, module

WARNINGS = ("SIGUSR1", "SIGUSR2", "SIGTERM", "clock")
STRATEGIES = ("ddp", "ddp", "ddp", "fsdp", "fsdp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")
ENDS = ("SIGKILL", "raise", "SIGINT")


def draw(seed: int, number: int) -> dict[str, Any]:
    """Return a run with the keys that `pair` reads; `moves` and `strikes` are the interruptions of its twin."""
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
    batches = limits(dice, drawn, steps, accumulate, moves)
    validates = validation(dice, drawn, batches, moves)
    words += clipping(dice, drawn["strategy"], manual)
    words += [*saves(dice, validates), *loggers(dice)]
    module(dice, drawn, validates, manual, accumulate, moves)
    counted = len(drawn["model"]["optimizers"])  # `max_steps` counts the steps of all optimizers
    is_short = first_end(drawn) < counted * -(-batches // accumulate)
    callbacks(dice, drawn, validates, manual, accumulate, moves, is_short)
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
    """Draw the data module, and return the number of optimizer steps of an epoch."""
    shares = drawn["ranks"] * accumulate
    size = 12 if moves else shares * dice.one(1, 2, 2, 3)  # 12 is divisible by each drawn number of ranks
    steps = dice.randint(3, 8)
    sizes = {
        "train": steps * size + dice.one(0, 0, 1, size - 1),
        "val": dice.randint(4, 14),  # at least one for each of 4 ranks
        "test": dice.randint(4, 7),
    }
    sizes |= {"other": dice.randint(4, 8)} if dice.chance(0.2) else {}
    drawn["data"] = {"_target_": "my_research.drawn_data.Data", "sizes": sizes, "global_batch_size": size}
    drawn["data"] |= {"seed": "${seed}", "num_workers": dice.one(0, 0, 0, 0, 1), "noisy": dice.chance(0.2)}
    if dice.chance(0.05):
        drawn["data"] |= {"_target_": "my_research.drawn_data.Stock", "shuffle": dice.chance(0.7)}
        del drawn["data"]["seed"]
        if moves:
            drawn["data"] |= {"shuffle": False, "noisy": False}  # random numbers depend on the ranks
    if dice.chance(0.1):
        drawn["words"].append(f"+trainer.reload_dataloaders_every_n_epochs={dice.one(1, 1, 2)}")
    return steps


def validation(dice: Dice, drawn: dict[str, Any], batches: int, moves: bool) -> bool:
    """Draw when the run validates, and return whether it validates at all."""
    words, sizes = drawn["words"], drawn["data"]["sizes"]
    is_one_batch = min(sizes["val"], sizes.get("other", 99)) < 2 * drawn["data"]["global_batch_size"]
    if dice.chance(0.05):
        words.append("+trainer.limit_val_batches=0")
        return False
    if dice.chance(0.25):
        limit = dice.one(1, 2, 0.5, 1.0)
        # With other ranks a batch limit selects other samples. A resumed run rejects this, a new run cannot.
        words.append(f"+trainer.limit_val_batches={1.0 if moves or (is_one_batch and limit == 0.5) else limit}")
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


def clipping(dice: Dice, strategy: str, manual: bool) -> list[str]:
    value = "null" if manual else dice.one("null", "null", 0.5, 0.05)
    algorithm = dice.chance(0.2) and value != "null" and "deepspeed" not in strategy
    return [f"trainer.gradient_clip_val={value}", *["+trainer.gradient_clip_algorithm=value"] * algorithm]


def limits(dice: Dice, drawn: dict[str, Any], steps: int, accumulate: int, moves: bool) -> int:
    """Draw the end of training and the limit of an epoch, and return the number of batches in an epoch."""
    batches, words = steps * accumulate, drawn["words"]
    if dice.chance(0.2):
        limit = dice.one(dice.randint(2, batches), 0.5, 0.8)
        if "deepspeed" in drawn["strategy"]:  # an epoch must have complete optimizer steps
            limit = dice.randint(1, steps) * accumulate
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
    if dice.chance(0.05):
        words.append(f"+trainer.min_steps={total}")
    if dice.chance(0.1):
        limit = dice.one(1, 2, 1.0)
        words.append(f"+trainer.limit_test_batches={1.0 if moves else limit}")
    return batches


def first_end(drawn: dict[str, Any]) -> float:
    """Return the smallest number of steps after which the run can end."""
    ends = [word.partition("max_steps=")[2] for word in (*drawn["words"], *drawn["first_words"])]
    return min((int(end) for end in ends if end), default=float("inf"))


BOARD = "{_target_:lightning.pytorch.loggers.TensorBoardLogger,save_dir:${run_dir},name:tensorboard,version:''}"
TABLE = "{_target_:lightning.pytorch.loggers.CSVLogger,save_dir:${run_dir},name:table,version:''"


def loggers(dice: Dice) -> list[str]:
    """Draw the loggers: none beside the project's TensorBoard, or TensorBoard and CSV."""
    if not dice.chance(0.08):
        return []
    table = f"{TABLE},flush_logs_every_n_steps:{dice.one(1, 3, 100)}}}"
    return ["logger=null", f"+logger.board={BOARD}", f"+logger.table={table}"]


def saves(dice: Dice, validates: bool) -> list[str]:
    every, keep = dice.one("null", 1, 2, 3, 5), dice.one(1, 2, 3)
    monitor = "val/loss" if validates and dice.chance(0.7) else "null"
    words = [f"checkpoint.every_n_steps={every}", f"checkpoint.keep={keep}", f"checkpoint.monitor={monitor}"]
    return [*words, f"checkpoint.mode={dice.one('min', 'min', 'max')}", "faults.retries=20"]


def strike(dice: Dice, drawn: dict[str, Any], batches: int) -> dict[str, Any]:
    """Draw an interruption: its kind, its place, the rank, and on which passage of that place it happens."""
    how = dice.choice(WARNINGS if dice.chance(0.6) else ENDS)
    places = ["training_step"] * 6 + ["validation_step"] * 2 + ["on_train_epoch_end"] * 2 + ["test_step"]
    where = dice.choice([*places, *["save"] * 6] if how == "SIGKILL" else places)
    most = {"training_step": 2 * batches, "validation_step": 4, "on_train_epoch_end": 2, "test_step": 2, "save": 20}[
        where
    ]
    rank = 0 if how == "clock" else dice.randrange(drawn["ranks"])
    return {"place": where, "deed": how, "count": dice.randint(1, most), "rank": rank}


def move(dice: Dice, drawn: dict[str, Any], accumulate: int) -> dict[str, Any]:
    """Draw another number of ranks, strategy and accumulation, with the same global batches."""
    layouts = [("single", 1), ("ddp", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 4)]
    # The last step of an epoch, if it is incomplete, can be shared out among other ranks, but not cut otherwise.
    is_uneven = drawn["data"]["_target_"].endswith("Stock") and drawn["data"]["sizes"]["train"] % 12
    if is_uneven:
        layouts = [layout for layout in layouts if 12 % (accumulate * layout[1]) == 0]
    ranks, strategy = dice.choice(layouts)[::-1]
    shares = [count for count in ([accumulate] if is_uneven else (1, 2, 3)) if 12 % (count * ranks) == 0]
    # Limits that count micro-batches mean other steps if the accumulation changes.
    counts = any("val_check_interval" in word or "limit_train_batches" in word for word in drawn["words"])
    again = accumulate in shares and (dice.chance(0.5) or counts)
    accumulate = accumulate if again else dice.choice(shares)
    words = [f"strategy={strategy}", f"trainer.devices={ranks}", f"trainer.accumulate_grad_batches={accumulate}"]
    return {"ranks": ranks, "words": words}
