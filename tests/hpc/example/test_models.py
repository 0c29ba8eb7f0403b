"""Check networks: sizes, causality, independence of samples, and the contract with hpc/."""

import pytest
import torch

from hpc.config import build as config_build
from hpc.config import compose
from my_research.models.gpt import GPT
from my_research.models.resnet import ResNet

DATA = {
    "gpt": ["data=text", "data.files=x", "data.vocab_size=50304"],
    "resnet50": ["data=images", "data.dir=x", "data.num_classes=1000"],
}


def build(model: str, *overrides: str) -> torch.nn.Module:
    data = next((more for prefix, more in DATA.items() if model.startswith(prefix)), [])
    return config_build.build(compose.compose_overrides([f"model={model}", *data, *overrides]).model.network)


@pytest.mark.parametrize(
    ("model", "overrides", "parameters"),
    [
        ("resnet_digits", [], 78_000),
        ("resnet50", [], 25_557_032),
        ("resnet50", ["model.network.norm=batch"], 25_557_032),
        ("gpt_124m", [], 124_000_000),
        ("gpt_1b", ["data.block_size=2048"], 1_316_000_000),
        ("gpt_7b", ["data.block_size=2048"], 6_660_000_000),
    ],
)
def test_sizes_are_the_published_ones(model: str, overrides: list[str], parameters: int) -> None:
    with torch.device("meta"):
        network = build(model, *overrides)
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(parameters, rel=0.01)


@pytest.fixture
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(num_layers=2, num_heads=2, width=16, vocab_size=11, block_size=8)


@pytest.fixture
def resnet() -> ResNet:
    torch.manual_seed(0)
    return ResNet([1, 1], [8, 16], num_classes=5, in_channels=1, image_size=8, large_images=False)


def test_gpt_sees_the_past_only(gpt: GPT) -> None:
    tokens = torch.randint(0, 11, (1, 8))
    later = tokens.clone()
    later[0, 5:] = (later[0, 5:] + 1) % 11
    same = torch.isclose(gpt(tokens), gpt(later), atol=1e-6).all(dim=-1)[0]
    assert same[:5].all() and not same[5:].any()


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_a_sample_does_not_depend_on_its_batch(name: str, request: pytest.FixtureRequest) -> None:
    network = request.getfixturevalue(name).train()
    inputs = torch.randint(0, 11, (4, 8)) if name == "gpt" else torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(network(inputs)[1:2], network(inputs[1:2]), atol=1e-5, rtol=1e-5)


def test_batch_norm_is_the_choice_that_does_depend_on_it() -> None:
    network = ResNet([1], [8], num_classes=5, in_channels=1, image_size=8, large_images=False, norm="batch").train()
    images = torch.randn(4, 1, 8, 8)
    assert not torch.allclose(network(images)[:2], network(images[:2]), atol=1e-3)


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_the_contract_with_hpc(name: str, request: pytest.FixtureRequest) -> None:
    network = request.getfixturevalue(name)
    assert len(list(network.blocks)) == 2
    logits = network(network.example_input(3))
    assert logits.shape[0] == 3 and logits.shape[-1] == network.head.out_features
    modules = dict(network.named_modules())
    for block in network.blocks:
        assert any(block is module for module in modules.values())


def test_the_tensor_parallel_plan_names_linear_layers_of_every_block(gpt: GPT) -> None:
    from fnmatch import fnmatchcase

    modules = dict(gpt.named_modules())
    for pattern in gpt.tensor_parallel_plan():
        found = [name for name in modules if fnmatchcase(name, pattern)]
        assert len(found) == 2 and all(isinstance(modules[name], torch.nn.Linear) for name in found)


def test_image_sizes_and_stems() -> None:
    assert build("resnet50", "model.network.num_classes=7")(torch.randn(1, 3, 64, 64)).shape == (1, 7)
