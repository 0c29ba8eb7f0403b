"""Check that one batch size is given and the other derived, under the name that the data's class takes."""

from typing import Any

import pytest

from hpc.config import batch_size, parse
from hpc.config.build import build_data
from hpc.config.compose import compose_overrides
from hpc.config.errors import ConfigError
from hpc.config.layout import derive_layout

ON_FOUR = ["strategy=ddp", "trainer.devices=4", "trainer.accelerator=cpu", "trainer.accumulate_grad_batches=2"]


def composed(*words: str) -> Any:
    cfg = compose_overrides([*ON_FOUR, *words])
    parse.raise_problems(batch_size.a_batch_can_be_shared(cfg.data, cfg.trainer, cfg.strategy))
    return cfg


def test_each_follows_from_the_other() -> None:
    for words in (["data.global_batch_size=64"], ["data.global_batch_size=null", "data.batch_size=8"]):
        layout = derive_layout(composed(*words))
        assert (layout.global_batch_size, layout.micro_batch_size) == (64, 8)


def test_both_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"data\.batch_size must not be given beside data\.global_batch_size \(64\)"):
        composed("data.batch_size=8")


def test_loaders_of_the_module_have_their_own() -> None:
    assert build_data(composed("data=none")) is None
    with pytest.raises(ConfigError, match=r"data\.batch_size must be left out with data=none") as rejected:
        composed("data=none", "data.batch_size=4")
    assert "data.batch_size=" in rejected.value.fix


@pytest.mark.parametrize("size", ["0", "2.5", "true", "many"])
def test_a_size_that_is_none_is_rejected(size: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.batch_size must be"):
        composed("data.global_batch_size=null", f"data.batch_size={size}")


def test_the_class_gets_the_size_that_it_takes() -> None:
    """Digits takes `global_batch_size`; a stock DataModule takes `batch_size`, or neither."""
    assert build_data(composed("data.global_batch_size=null", "data.batch_size=8")).global_batch_size == 64
    stock = {"_target_": "torch.utils.data.DataLoader", "dataset": [1, 2], "global_batch_size": 16}
    cfg = composed()
    cfg.data = stock
    assert batch_size.with_class_batch_size(dict(stock), cfg) == {
        "_target_": "torch.utils.data.DataLoader", "dataset": [1, 2], "batch_size": 2,
    }  # fmt: skip
    neither = {"_target_": "torch.utils.data.TensorDataset", "global_batch_size": 16}
    assert batch_size.with_class_batch_size(neither, cfg) == neither  # its arguments are checked later


def test_neither_is_what_the_loaders_say() -> None:
    assert derive_layout(composed("data.global_batch_size=null")).micro_batch_size is None


def test_the_rule_is_one_of_the_list() -> None:
    with pytest.raises(ConfigError, match="must not be given beside"):
        parse.parse(compose_overrides(["data.batch_size=8"]))
