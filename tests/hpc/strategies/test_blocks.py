"""Check which parts of a researcher's module are taken as its blocks, and what a strategy does without any."""

from copy import deepcopy
from types import SimpleNamespace

import lightning as L
import pytest
from torch import nn

from hpc.config.errors import ConfigError
from hpc.strategies.blocks import find_blocks
from hpc.strategies.parallelize import ModuleChanges, parallelize


def layers(num: int, width: int = 4) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num)]


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))  # parts of several kinds
        self.encoder = nn.ModuleList(layers(2))
        self.decoder = nn.ModuleList(layers(3, width=8))


def module(network: nn.Module) -> L.LightningModule:
    holder = L.LightningModule()
    holder.network, holder._trainer = network, SimpleNamespace(is_global_zero=True)
    return holder


def test_the_longest_list_of_equal_parts_is_taken() -> None:
    blocks = find_blocks(module(EncoderDecoder()))
    assert str(blocks) == "network.decoder (3 Sequential)"
    assert blocks.owner.__class__ is EncoderDecoder


def test_a_list_called_blocks_comes_first_and_a_path_before_it() -> None:
    network = EncoderDecoder()
    network.blocks = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 4)])  # not even equal
    assert find_blocks(module(network)).paths == ("network.blocks",)
    both = find_blocks(module(network), ["network.encoder", "network.decoder"])
    assert len(both.modules) == 5 and str(both) == "network.encoder, network.decoder (5 Sequential)"


def test_lists_like_the_found_one_join_it() -> None:
    """A teacher's blocks are sharded as the student's are, so that each parameter meets its own kind in an average."""
    holder = module(EncoderDecoder())
    holder.teacher = deepcopy(holder.network)
    assert find_blocks(holder).paths == ("network.decoder", "teacher.decoder")


def test_an_empty_list_of_paths_means_no_blocks() -> None:
    assert find_blocks(module(EncoderDecoder()), []) is None


def test_parts_that_are_unequal_or_without_weights_are_no_blocks() -> None:
    network = nn.Module()
    network.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 3)])
    network.pools = nn.ModuleList([nn.ReLU() for _ in range(5)])
    assert find_blocks(module(network)) is None


def test_a_path_that_leads_to_no_list_is_rejected_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"it has network\.stem, network\.encoder, ") as caught:
        find_blocks(module(EncoderDecoder()), "network.decoders")
    assert "strategy.blocks=network.decoder" in caught.value.fix


def test_what_needs_blocks_says_so(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ConfigError, match="has no list of equal blocks to recompute"):
        parallelize(module(nn.Linear(2, 2)), None, ModuleChanges(activation_checkpointing=True))
    parallelize(module(EncoderDecoder()), None, ModuleChanges(activation_checkpointing=True))
    assert "strategy: blocks of the module: network.decoder (3 Sequential)" in capsys.readouterr().out
