"""How fast a run says it is, and what it takes for a network's FLOPs and a device's peak."""

from time import perf_counter

import pytest
import torch

from {{ cookiecutter.package_name }}.hpc.monitoring.flops import training_flops
from {{ cookiecutter.package_name }}.hpc.monitoring.throughput import Window, speed
from {{ cookiecutter.package_name }}.hpc.planning.hardware import peak
from {{ cookiecutter.package_name }}.models.gpt import GPT
from {{ cookiecutter.package_name }}.models.resnet import ResNet


def test_the_flops_of_a_gpt_are_those_of_the_formula() -> None:
    """6 N + 12 L d T per token (PaLM, appendix B), N without the input embedding's lookup."""
    layers, width, time, vocab = 3, 64, 32, 128
    network = GPT(num_layers=layers, num_heads=4, width=width, vocab_size=vocab, block_size=time)
    weights = layers * 12 * width**2 + vocab * width
    assert training_flops(network) == time * (6 * weights + 12 * layers * width * time)


def test_tracing_changes_neither_the_network_nor_the_random_numbers() -> None:
    network = GPT(num_layers=1, num_heads=2, width=16, vocab_size=11, block_size=8, dropout=0.5)
    before, random = {k: v.clone() for k, v in network.state_dict().items()}, torch.get_rng_state()
    training_flops(network)
    assert torch.equal(random, torch.get_rng_state()) and network.training
    assert all(p.grad is None and p.device.type == "cpu" for p in network.parameters())
    assert all(torch.equal(network.state_dict()[name], value) for name, value in before.items())


def test_a_network_of_any_size_costs_no_memory() -> None:
    with torch.device("meta"):  # 6.7 billion parameters
        network = GPT(num_layers=32, num_heads=32, width=4096, vocab_size=50304, block_size=2048)
    assert training_flops(network) / 2048 == pytest.approx(6 * 6.65e9 + 12 * 32 * 4096 * 2048, rel=0.01)


def test_the_flops_of_resnet_50_are_the_published_ones() -> None:
    """4.09 billion multiply-adds forward for 224 pixels (torchvision's table); backward is twice as much."""
    network = ResNet(depths=[3, 4, 6, 3], widths=[64, 128, 256, 512], num_classes=1000, image_size=224, bottleneck=True)
    first = 2 * 7 * 7 * 3 * 64 * 112 * 112  # no gradient is needed for the image itself
    assert training_flops(network) == pytest.approx(3 * 2 * 4.09e9 - first, rel=0.01)


def test_a_window_adds_up() -> None:
    window = Window(began=100.0, waited=2.0, ended=110.0, steps=20)
    for i in range(20):
        window.add(torch.zeros(8, 16, dtype=torch.int64))
        window.spans.append((100.0 + i / 4, 100.2 + i / 4))
    numbers = speed(window, replicas=4, world_size=8, flops=1e12, peak=64e12)
    assert numbers["perf/tokens_per_second"] == 20 * 8 * 16 * 4 / 10
    assert numbers["perf/tokens_per_second_per_device"] == 20 * 8 * 16 * 4 / 10 / 8
    assert numbers["perf/tflops"] == pytest.approx(20 * 8 * 4 / 10 / 8)
    assert numbers["perf/mfu"] == pytest.approx(8 / 64)
    parts = [numbers[f"perf/{part}_seconds"] for part in ("step", "compute", "data", "other")]
    assert parts == pytest.approx([0.5, 0.2, 0.1, 0.2])


def test_waiting_for_data_while_a_gpu_computes_costs_nothing() -> None:
    window = Window(began=0.0, waited=9.0, ended=10.0, steps=10, spans=[(0.0, 9.5)])
    window.add(torch.zeros(8, 3))
    numbers = speed(window, 1, 1, 1.0, None)
    assert numbers["perf/data_seconds"] == pytest.approx(0.05) and "perf/mfu" not in numbers
    assert numbers["perf/samples_per_second"] == 0.8


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.4),
        ("NVIDIA H100 PCIe", "bf16-true", 756.0),
        ("NVIDIA GH200 120GB", "bf16-mixed", 989.4),
        ("NVIDIA A100-SXM4-40GB", "32-true", 156.0),
        ("Tesla V100-SXM2-32GB", "16-mixed", 125.0),
        ("Tesla V100-SXM2-32GB", "32-true", 15.7),
        ("NVIDIA L40S", "bf16-mixed", 362.0),
        ("AMD Instinct MI250X", "bf16-mixed", 191.5),
        ("Tesla V100-SXM2-32GB", "bf16-mixed", None),
        ("cpu", "32-true", None),
    ],
)
def test_the_peak_is_that_of_the_device_and_the_arithmetic(name: str, precision: str, tera: float | None) -> None:
    assert peak(name, precision, tf32=True) == (tera and pytest.approx(tera * 1e12))


def test_moments_are_read_once() -> None:
    from {{ cookiecutter.package_name }}.hpc.monitoring.throughput import between, now

    start = now(torch.device("cpu"))
    assert 0 <= between(start, now(torch.device("cpu"))) <= perf_counter() - start
