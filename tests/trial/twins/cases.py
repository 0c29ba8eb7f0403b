"""Draws of twins that are tried by name: small versions of those that have revealed bugs, and rejected ones."""

from typing import Any

# One device, dropout and momentum, interrupted by a signal in the second epoch.
PLAIN: dict[str, Any] = {
    "strategy": "single", "ranks": 1, "first_words": [], "then_words": [], "moves": [], "tolerance": 0.0,
    "words": ["trainer.max_epochs=3", "trainer.gradient_clip_val=null", "checkpoint.monitor=val/loss"],
    "strikes": [{"place": "training_step", "deed": "SIGUSR1", "count": 7, "rank": 0}],
    "data": {
        "_target_": "my_research.drawn_data.Data", "sizes": {"train": 21, "val": 5, "test": 4}, "global_batch_size": 4,
        "seed": "${seed}",
    },
    "model": {
        "_target_": "my_research.drawn.Drawn",
        "network": {"_target_": "my_research.drawn.Network", "dropout": 0.2},
        "optimizers": [{"name": "SGD", "lr": 0.1, "momentum": 0.9, "schedulers": []}],
    },
    "callbacks": {"progress": None, "samples": None, "monitor": None, "throughput": None},
}  # fmt: skip


def changed(model: dict[str, Any], words: list[str], strikes: list[dict[str, Any]]) -> dict[str, Any]:
    return {**PLAIN, "model": {**PLAIN["model"], **model}, "words": [*PLAIN["words"], *words], "strikes": strikes}


def struck(where: str, count: int, how: str = "SIGUSR1") -> dict[str, Any]:
    return {"place": where, "deed": how, "count": count, "rank": 0}


def stopping(patience: int) -> dict[str, Any]:
    """Return callbacks, one of which stops training after this number of validations."""
    stop = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val/loss", "min_delta": 10.0}
    return PLAIN["callbacks"] | {"stop": {**stop, "patience": patience}}


NO_DROPOUT = {"network": {"_target_": "my_research.drawn.Network"}}
STOPPED_LATE = [struck("training_step", 7)]
NETWORK = PLAIN["model"]["network"]
SHARED = {
    "own_clip": True,
    "is_shared": True,
}
STOCK = {"_target_": "my_research.drawn_data.Stock", "sizes": PLAIN["data"]["sizes"], "global_batch_size": 4}
SGD = {"name": "SGD", "lr": 0.1, "momentum": 0.9, "schedulers": []}
# Small versions of random runs that have revealed bugs.
FOUND = {
    "gradients that are accumulated by hand": changed(
        {"manual": True, "every": 2, "optimizers": [SGD, SGD]}, [], [struck("training_step", 3)]
    ),
    "workers that stay, and drop-out": {
        **changed({}, [], [struck("validation_step", 1)]),
        "data": {**PLAIN["data"], "num_workers": 1},
    },
    "points of two optimizers": changed(
        {"manual": True, "optimizers": [SGD, SGD], "logs": "step"}, [], [struck("training_step", 6)]
    ),
    "double precision": changed({}, ["trainer.precision=64-true"], [struck("training_step", 7)]),
    "what an optimizer keeps in a precision of its own": changed(
        {"optimizers": [{"name": "NAdam", "lr": 0.01, "schedulers": []}], "logs": "epoch"},
        ["trainer.precision=64-true"],
        [struck("training_step", 7)],
    ),
    "several validation loaders, and a monitor": {
        **changed({}, [], [struck("training_step", 2, "SIGKILL")]),
        "data": {**PLAIN["data"], "sizes": {**PLAIN["data"]["sizes"], "other": 3}},
    },
    "batch norm of features, on two ranks": {
        **changed({"network": {**NETWORK, "norm": True}, **SHARED}, [], [struck("training_step", 7)]),
        "strategy": "ddp",
        "ranks": 2,
    },
    "buffers that two ranks train with": {
        **changed({"keeps": True, **SHARED}, [], [struck("training_step", 7)]),
        "strategy": "ddp",
        "ranks": 2,
    },
    "weights that are averaged, and gradients cut": {
        **changed(
            {"network": NETWORK},
            ["trainer.gradient_clip_val=0.05", "+trainer.gradient_clip_algorithm=value"],
            [struck("validation_step", 5)],
        ),
        "callbacks": PLAIN["callbacks"]
        | {
            "swa": {
                "_target_": "lightning.pytorch.callbacks.StochasticWeightAveraging",
                "swa_lrs": 0.01,
                "swa_epoch_start": 1,
                "annealing_epochs": 2,
            }
        },
    },
    "stock data whose validation begins later": {
        **changed({}, ["+trainer.check_val_every_n_epoch=2", "+trainer.num_sanity_val_steps=0"], STOPPED_LATE),
        "data": STOCK,
    },
    "an extension, from an epoch's end": {
        **changed({}, [], []),
        "first_words": ["trainer.max_epochs=2"],
        "then_words": ["trainer.max_epochs=3"],
    },
    "a test of what was stopped early between two batches of one step": {
        **changed(
            {"logs": "epoch"},
            ["trainer.accumulate_grad_batches=2", "+trainer.overfit_batches=2", "+trainer.val_check_interval=0.5"],
            [struck("test_step", 1)],
        ),
        "callbacks": stopping(patience=2),
    },
    "a test of a run whose two optimizers have made a step more than it was to have": changed(
        {"manual": True, "optimizers": [SGD, SGD]}, ["trainer.max_steps=5"], [struck("test_step", 1, "raise")]
    ),
    "a test of a run that ended within an epoch": changed(
        {"logs": "epoch"}, ["trainer.max_steps=7"], [struck("test_step", 1, "SIGKILL")]
    ),
    "an extension, right after a validation within an epoch": {
        **changed({}, ["trainer.max_steps=8", "+trainer.val_check_interval=2"], []),
        "data": {**STOCK, "shuffle": True},
        "first_words": ["trainer.max_steps=4"],
        "then_words": ["trainer.max_steps=8"],
    },
    "an extension of what was stopped early within an epoch": {
        **changed({"logs": "epoch"}, ["+trainer.val_check_interval=2"], []),
        "callbacks": stopping(patience=1),
        "first_words": ["trainer.max_epochs=2"],
        "then_words": ["trainer.max_epochs=3"],
    },
    "an extension of what `max_steps` ended, where a callback would stop at the epoch's end": {
        **changed({"logs": "epoch"}, ["trainer.max_steps=16"], []),
        "callbacks": stopping(patience=2),
        "first_words": ["trainer.max_steps=13"],
        "then_words": ["trainer.max_steps=16"],
    },
    "an epoch that `max_steps` cuts, struck as it ends": changed(
        {"logs": "epoch"}, ["trainer.max_steps=7"], [struck("on_train_epoch_end", 2, "raise")]
    ),
    "a test after a schedule of accumulation": {
        **changed({}, [], [struck("test_step", 1, "SIGKILL")]),
        "callbacks": PLAIN["callbacks"]
        | {
            "accumulation": {
                "_target_": "lightning.pytorch.callbacks.GradientAccumulationScheduler",
                "scheduling": {0: 1, 1: 2},
            }
        },
    },
    "a metric in the progress bar, of two ranks that stop early within an epoch": {
        **changed({"logs": "metric", **SHARED}, ["+trainer.val_check_interval=2"], []),
        "strategy": "ddp",
        "ranks": 2,
        "callbacks": PLAIN["callbacks"]
        | {
            "throughput": {"_target_": "hpc.monitor.throughput.Throughput"},
            "stop": {
                "_target_": "lightning.pytorch.callbacks.EarlyStopping",
                "monitor": "val/loss",
                "patience": 2,
                "min_delta": 10.0,
            },
        },
    },
    "a schedule of accumulation, stopped early at an epoch's end": {
        **changed({}, [], [struck("on_train_epoch_end", 2)]),
        "callbacks": PLAIN["callbacks"]
        | {
            "stop": {
                "_target_": "lightning.pytorch.callbacks.EarlyStopping",
                "monitor": "val/loss",
                "patience": 1,
                "min_delta": 10.0,
                "check_on_train_epoch_end": True,
            },
            "accumulation": {
                "_target_": "lightning.pytorch.callbacks.GradientAccumulationScheduler",
                "scheduling": {0: 1, 1: 4, 2: 1},
            },
        },
    },
    "datasets that are made anew in each epoch": {
        **changed({}, ["+trainer.reload_dataloaders_every_n_epochs=1"], [struck("training_step", 15)]),
        "data": STOCK,
    },
    "loaders that are made anew in each epoch, stopped at the end of a validation": changed(
        {}, ["+trainer.reload_dataloaders_every_n_epochs=1", "trainer.max_steps=5"], [struck("validation_step", 2)]
    ),
    "loaders for two epochs, stopped in the second": {
        **changed({}, ["+trainer.reload_dataloaders_every_n_epochs=2"], [struck("training_step", 9)]),
        "data": STOCK,
    },
    "a last batch that ranks do not divide, moved to one": {
        **changed(
            {**SHARED, **NO_DROPOUT, "logs": "metric"}, ["trainer.precision=64-true"], [struck("training_step", 9)]
        ),
        "data": {**STOCK, "shuffle": False},
        "strategy": "ddp",
        "ranks": 2,
        "moves": [{"ranks": 1, "words": ["strategy=single", "trainer.devices=1"]}],
        "tolerance": 1e-9,
    },
    "gradients that are clipped by value": changed(
        {}, ["trainer.gradient_clip_val=0.05", "+trainer.gradient_clip_algorithm=value"], STOPPED_LATE
    ),
    "what is frozen and released by turns on four ranks": {
        **changed(
            {
                **NO_DROPOUT,
                **SHARED,
                "targets": [["released", "on_before_backward"], ["replaced", "on_after_backward"]],
            },
            ["+strategy.lightning.find_unused_parameters=true"],
            [struck("training_step", 6)],
        ),
        "strategy": "ddp",
        "ranks": 4,
    },
}

# Runs that must be rejected, by a part of the message.
DEEPSPEED = {"strategy": "deepspeed_zero1", "ranks": 2}
REJECTED = {
    "accumulate_grad_batches": changed({}, ["trainer.accumulate_grad_batches=3"], STOPPED_LATE),
    "replaces Adagrad": {**changed({"optimizers": [{"name": "Adagrad", "lr": 0.01}], **SHARED}, [], []), **DEEPSPEED},
    "DeepSpeed keeps the statistics in fp32": {
        **changed({"network": {**NETWORK, "norm": True}, **SHARED}, ["trainer.precision=bf16-mixed"], []),
        **DEEPSPEED,
    },
    "FSDP2 gathers the weights in bf16": {
        **changed({"network": {**NETWORK, "norm": True}, **SHARED}, ["trainer.precision=bf16-mixed"], []),
        "strategy": "fsdp",
        "ranks": 2,
    },
    "must divide the batches of an epoch under DeepSpeed": {
        **changed(SHARED, ["trainer.accumulate_grad_batches=2", "+trainer.limit_train_batches=3"], []),
        **DEEPSPEED,
    },
    "Only one callback may average": {
        **PLAIN,
        "callbacks": PLAIN["callbacks"]
        | {
            "ema": {"_target_": "lightning.pytorch.callbacks.EMAWeightAveraging"},
            "averaging": {"_target_": "my_research.drawn.weight_averaging"},
        },
    },
}
