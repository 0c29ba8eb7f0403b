"""Check the changes that a user may permit for a resumed run: data, learning rates, other keys."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fork import scalars
from omegaconf import OmegaConf
from PIL import Image
from test_data import built, make_images
from test_move import compose, moving, run  # noqa: F401

from hpc.config.errors import ConfigError
from hpc.data import same_data
from hpc.packed import token_files
from hpc.resume import changed_hyperparameters
from hpc.run import changes, command_line, frozen_config

WORDS = [
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "trainer.log_every_n_steps=1",
    "+trainer.enable_progress_bar=false",
    "+trainer.limit_val_batches=1",
    "+trainer.limit_test_batches=1",
    "callbacks.progress=null",
    "callbacks.samples=null",
    "model.network.widths=[8,8,16]",
]
ALLOW = "resume_allow=[data]"


def image(file: Path, value: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(file)


def events(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "attempts.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == "allowed"]


# A run on images that change: renamed classes rotate the labels.


@pytest.mark.soak
def test_changed_data_are_rejected_until_they_are_permitted(start: Callable[..., str], tmp_path: Path) -> None:
    folder, run_dir = tmp_path / "images", tmp_path / "run"
    make_images(folder, ("ant", "bee", "cat"), num=30, size=(8, 8))
    words = ["data=images", f"data.dir={folder}", "data.image_size=8", "data.num_workers=0", "data.global_batch_size=8"]
    words += ["model.network.in_channels=3", "trainer.max_steps=8"]
    start(run_dir, 1, [*WORDS, *words], stop_at=3)
    (folder / "ant").rename(folder / "dog")  # labels rotate
    image(folder / "bee" / "new.png", 7)
    output = start(run_dir, 1, [], code=2)
    assert "train: classes ant -> dog" in output and "must continue with the data that it started with" in output
    assert ALLOW in output
    assert "data changed, as resume_allow=[data] permits" in start(run_dir, 1, [ALLOW], stop_at=5)
    assert len(events(run_dir)) == 1 and not changes.read_permission(run_dir)
    for checkpoint in (run_dir / "checkpoints").glob("step-0*5-*"):
        shutil.rmtree(checkpoint)  # the job starts again, from a checkpoint before the change
    (run_dir / "checkpoints" / "last.ckpt").unlink(missing_ok=True)
    start(run_dir, 1, [], stop_at=6)
    image(folder / "bee" / "newer.png", 7)
    assert "samples" in start(run_dir, 1, [], code=2)  # the permission covered the earlier change only
    start(run_dir, 1, [ALLOW])
    assert len(events(run_dir)) == 2


# Detection of changed data


def fingerprints(folder: Path, tmp_path: Path) -> Callable[[], dict[str, Any]]:
    return lambda: built("images", dir=str(folder), image_size=8).fingerprint()


def test_images_are_recognized_by_names_labels_and_sizes(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "images", num=30)
    of = fingerprints(folder, tmp_path)
    before = of()
    assert before == of() and before["train"]["samples"] > 0
    assert built("images", dir=str(shutil.copytree(folder, tmp_path / "copy")), image_size=8).fingerprint() == before
    image(folder / "cat" / "2.JPG", 3)  # another size
    other = of()
    assert same_data.list_differences(before, other) and other["train"]["samples"] == before["train"]["samples"]
    (folder / "cat").rename(folder / "eel")
    assert "train: classes cat -> eel" in same_data.list_differences(other, of())


def test_text_is_recognized_by_names_and_sizes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "text" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "text" / name).write_bytes(bytes(range(100)) * 20)

    def of(folder: str) -> dict[str, Any]:
        return built("text", files=str(tmp_path / folder), block_size=8).fingerprint()

    before = of("text")
    shutil.copytree(tmp_path / "text", tmp_path / "copy")
    assert of("copy") == before
    (tmp_path / "copy" / "b").rename(tmp_path / "copy" / "c")
    assert same_data.list_differences(before, of("copy")) == [f"{split}: files differ" for split in before]
    (tmp_path / "text" / "b").write_bytes(bytes(range(100)) * 21)
    assert "train: samples" in " ".join(same_data.list_differences(before, of("text")))


def test_stock_datasets_are_compared_by_their_number_of_samples() -> None:
    def described(num: int, **others: Any) -> dict[str, Any]:
        loader = SimpleNamespace(flattened=[SimpleNamespace(dataset=range(num)), SimpleNamespace()])
        val = SimpleNamespace(_combined_loader=None)
        loop = SimpleNamespace(_combined_loader=loader, epoch_loop=SimpleNamespace(val_loop=val))
        return same_data.data_identity(SimpleNamespace(datamodule=None, fit_loop=loop))

    assert same_data.list_differences(described(50), described(50)) == []
    assert same_data.list_differences(described(50), described(51)) == ["train: samples 50 -> 51"]
    assert same_data.list_differences({"val": {"samples": 3}}, described(51)) == []  # only one start read this split


@pytest.mark.parametrize("checksum", ["one", "other"])
def test_tokens_are_recognized_by_the_notes_of_their_packing(
    checksum: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = {"checksum": "one", "tokens": 100, "vocab_size": 64, "bytes_per_token": 1.0, "tokenizer": "t"}
    monkeypatch.setattr(token_files, "read_token_notes", lambda file: noted)
    np.save(tmp_path / "tokens.npy", np.arange(100))
    before = token_files.text_checksum([str(tmp_path / "tokens.npy")])
    noted["checksum"] = checksum
    assert (token_files.text_checksum([str(tmp_path / "tokens.npy")]) == before) == (checksum == "one")


@pytest.mark.parametrize("has_test", [True, False])
def test_a_test_on_the_validation_data_is_noted(has_test: bool, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for split in ("train", "val", "test") if has_test else ("train", "val"):
        make_images(tmp_path / split, num=6)
    data = built("images", dir=str(tmp_path), image_size=8)
    data.trainer = SimpleNamespace(is_global_zero=True, strategy=None, accumulate_grad_batches=1, num_devices=1)
    data.train_dataloader(), data.test_dataloader()
    assert capsys.readouterr().out.count("the test evaluates the samples of validation again") == (not has_test)


# Keys of the config


LR = "model.optimizer.lr"


@pytest.mark.slow
def test_a_key_that_resume_allow_names_is_changed(run: Path) -> None:  # noqa: F811
    with pytest.raises(ConfigError) as caught:
        compose(run, f"{LR}=0.1")
    assert f"{LR}=0.1 resume_allow=[{LR}] to change it on purpose" in caught.value.fix
    cfg = compose(run, f"{LR}=0.1", f"resume_allow=[{LR}]")
    (run / "attempts.jsonl").touch()
    frozen_config.create_or_replace(run, cfg, words=[f"{LR}=0.1", f"resume_allow=[{LR}]"])
    assert frozen_config.read(run).model.optimizer.lr == 0.1 and list(frozen_config.read(run).resume_allow) == []
    assert "resume_allow" not in (run / "overrides.json").read_text()
    assert events(run)[0]["changes"] == [f"{LR}: 0.003 -> 0.1"]
    assert compose(run).model.optimizer.lr == 0.1  # as the job starts, again and again
    assert compose(run, "trainer.num_nodes=2").model.optimizer.lr == 0.1
    with pytest.raises(ConfigError, match=LR):  # even if it is typed again
        compose(run, f"{LR}=0.2")


@pytest.mark.slow
def test_keys_below_a_named_section_may_change(run: Path) -> None:  # noqa: F811
    compose(run, "+model.optimizer.eps=1e-6", "resume_allow=[model.optimizer]")
    with pytest.raises(ConfigError, match=r"model\.warmup_steps=7"):
        compose(run, f"{LR}=0.1", "model.warmup_steps=7", f"resume_allow=[{LR}]")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=3", "resume_allow=[seed]"], "cannot name seed, which must stay the same"),
        (["data.global_batch_size=8", "resume_allow=[data]"], "data.global_batch_size must stay 64"),
        (["resume_allow=[model.optimizer.lrr]"], r"resume_allow=\[model.optimizer.lr\]"),
    ],
)
def test_permissions_that_cannot_be_given_are_rejected(words: list[str], message: str, run: Path) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match=message):
        compose(run, *words)


def test_a_new_run_needs_no_permission() -> None:
    with pytest.raises(ConfigError, match="must be left out of a new run"):
        command_line.compose(None, [ALLOW])


@pytest.mark.slow
def test_a_permission_waits_for_its_job(run: Path) -> None:  # noqa: F811
    frozen_config.create_or_replace(run, compose(run, ALLOW), words=[ALLOW])
    assert frozen_config.list_changes(run, compose(run, ALLOW)) == []
    frozen_config.create_or_replace(run, compose(run), words=[])  # the job starts
    assert changes.read_permission(run) == ["data"]
    changes.withdraw_permission(run)
    assert changes.read_permission(run) == []


@pytest.mark.slow
def test_submit_takes_a_permission_for_one_job(moving: Any) -> None:  # noqa: F811
    run_dir = Path("mine")
    (run_dir / "attempts.jsonl").touch()
    assert moving.type("resume=mine", f"{LR}=0.1") == 2 and f"resume_allow=[{LR}]" in moving.err
    assert moving.type("resume=mine", f"{LR}=0.1", f"resume_allow=[{LR},data]") == 0
    assert frozen_config.read(run_dir).model.optimizer.lr == 0.1 and events(run_dir)[0]["changes"] == [
        f"{LR}: 0.003 -> 0.1"
    ]
    assert changes.read_permission(run_dir) == [LR, "data"]
    moving.scheduler("echo 19")
    assert moving.type("resume=mine") == 0  # the job before it was cancelled
    assert changes.read_permission(run_dir) == []


# Permitted changes take effect


@pytest.mark.soak
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("deepspeed_zero2", 2)])
def test_a_changed_learning_rate_takes_effect(
    strategy: str, ranks: int, start: Callable[..., str], tmp_path: Path
) -> None:
    words = [*WORDS, f"strategy={strategy}", f"trainer.devices={ranks}", "trainer.max_steps=30"]
    start(tmp_path / "run", ranks, words, stop_at=5)
    output = start(tmp_path / "run", ranks, [f"{LR}=0.03", f"resume_allow=[{LR}]"], stop_at=9)
    assert f"{LR}: 0.003 -> 0.03" in output
    start(tmp_path / "run", ranks, [])
    start(tmp_path / "other", ranks, [*words, f"{LR}=0.03"])
    first, rates = scalars(tmp_path / "other", "step/lr"), scalars(tmp_path / "run", "step/lr")
    assert rates == pytest.approx([lr / 10 if step < 5 else lr for step, lr in enumerate(first)], rel=1e-6)


class Trainer:
    """A stand-in for the parts of a trainer that `HyperparameterUpdater` reads."""

    is_global_zero, max_epochs, max_steps = True, 3, -1

    def __init__(self, lr: float, kind: Callable[[Any], Any], weight_decay: float = 0.1) -> None:
        weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
        groups = [{"params": weights[:1]}, {"params": weights[1:], "lr": lr / 2}]
        self.optimizers = [torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay)]
        self.schedule = kind(self.optimizers[0])
        self.lr_scheduler_configs = [SimpleNamespace(scheduler=self.schedule)]

    def steps(self, num: int) -> list[list[float]]:
        rates = []
        for _ in range(num):
            rates.append([group["lr"] for group in self.optimizers[0].param_groups])
            self.optimizers[0].step()
            self.schedule.step(*[1.0] * isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau))
        return rates


SCHEDULES = torch.optim.lr_scheduler
KINDS = {
    "lambda": lambda optimizer: SCHEDULES.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "exponential": lambda optimizer: SCHEDULES.ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: SCHEDULES.CosineAnnealingLR(optimizer, 20),
    "plateau": lambda optimizer: SCHEDULES.ReduceLROnPlateau(optimizer, patience=1),
    "sequential": lambda optimizer: SCHEDULES.SequentialLR(
        optimizer,
        [SCHEDULES.LinearLR(optimizer, 0.1, total_iters=3), SCHEDULES.CosineAnnealingLR(optimizer, 20)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [2, 6])
def test_a_schedule_continues_as_if_it_had_started_with_the_new_rate(kind: str, stop: int) -> None:
    old, new, all_new = (Trainer(lr, KINDS[kind]) for lr in (0.1, 0.4, 0.4))
    resumed(old, new, stop, changed=True)
    assert np.array(new.steps(6)) == pytest.approx(np.array(all_new.steps(stop + 6)[stop:]))


def test_other_values_change_and_an_edit_of_the_code_changes_nothing() -> None:
    for changed in (True, False):
        old, new = Trainer(0.1, KINDS["cosine"]), Trainer(0.1, KINDS["cosine"], weight_decay=0.3)
        resumed(old, new, 3, changed=changed)
        assert [group["weight_decay"] for group in new.optimizers[0].param_groups] == [0.3 if changed else 0.1] * 2
        assert new.steps(5) == old.steps(5)


def test_a_longer_training_leaves_schedules_alone_that_do_not_follow_its_length() -> None:
    """Check that a longer training keeps the rates of schedules that do not depend on its length.

    Another schedule of the same optimizer may have set the rate since.
    """
    old, new = Trainer(0.1, KINDS["exponential"]), Trainer(0.1, KINDS["exponential"])
    new.max_steps = 40
    old.schedule._last_lr = [0.5, 0.5]
    resumed(old, new, 0, changed=False)
    assert new.schedule.get_last_lr() == [0.5, 0.5]


def test_the_key_in_a_checkpoint_does_not_follow_the_name_of_the_class() -> None:
    assert changed_hyperparameters.HyperparameterUpdater(OmegaConf.create({})).state_key == "Hyperparameters"


def resumed(old: Any, new: Any, stop: int, *, changed: bool) -> None:
    """Save one trainer after some steps and restore it in the other, as Lightning does."""
    first = changed_hyperparameters.HyperparameterUpdater(OmegaConf.create({"lr": 1}))
    second = changed_hyperparameters.HyperparameterUpdater(OmegaConf.create({"lr": 2 if changed else 1}))
    first.on_fit_start(old, None)  # type: ignore[arg-type]
    second.on_fit_start(new, None)  # type: ignore[arg-type]
    old.steps(stop)
    second.load_state_dict(first.state_dict())
    new.optimizers[0].load_state_dict(old.optimizers[0].state_dict())
    new.schedule.load_state_dict(old.schedule.state_dict())
    second.on_train_start(new, None)  # type: ignore[arg-type]
