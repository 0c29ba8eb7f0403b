"""Check the GPU facts in hardware.yaml, and which GPU a name selects."""

import pytest
from omegaconf import OmegaConf

from hpc.config.errors import ConfigError
from hpc.config.project import CONFIGS
from hpc.jobs.hardware import _read_hardware, gpu_from_config_name, gpu_from_device_name, machine_from_cluster

FILES = sorted((CONFIGS / "cluster").glob("*.yaml"))


@pytest.mark.parametrize("name", list(_read_hardware()["gpus"]))
def test_every_gpu_is_whole_and_reaches_less_than_its_maker_says(name: str) -> None:
    found = gpu_from_config_name(name)
    assert found.name == name
    assert 10 < found.memory_gb < 300 and 100 < found.bandwidth_gbs < 20_000 and 20 < found.link_gbs < 2_000
    assert {"fp16", "fp32", "fp64"} <= set(found.tflops) and min(found.tflops.values()) > 0
    assert 0 < found.matmul_share < 1 and 0 < found.attention_share < 1 and 0 < found.fixed_gb < 5


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GH200 120GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA A100-SXM-64GB", "A100-SXM-64GB"),
        ("AMD Instinct MI250X", "MI250X"),
        ("h100 pcie", "H100 PCIe"),
    ],
)
def test_the_longest_name_counts(device: str, name: str) -> None:
    assert gpu_from_config_name(device).name == name


@pytest.mark.parametrize("device", ["NVIDIA L40", "NVIDIA RTX A1000", "H1000", "cpu", ""])
def test_a_part_of_a_word_is_no_name(device: str) -> None:
    assert gpu_from_device_name(device) is None


def test_chips_of_one_name_differ_in_what_they_compute() -> None:
    """Check Leonardo's A100 with 124 multiprocessors instead of 108, and the two GPUs of a Grace Blackwell board."""
    standard, leonardo = gpu_from_config_name("A100"), gpu_from_config_name("A100-SXM-64GB")
    assert {name: round(peak / standard.tflops[name], 2) for name, peak in leonardo.tflops.items()} == dict.fromkeys(
        standard.tflops, round(124 / 108, 2)
    )
    assert gpu_from_config_name("GB200").tflops["bf16"] > gpu_from_config_name("B200").tflops["bf16"]


def test_the_links_of_an_apu_are_those_of_a_mi300x() -> None:
    """Check two links to each of three others, and one to each of seven."""
    links = {name: gpu_from_config_name(name).link_gbs for name in ("MI300X", "MI300A")}
    assert links["MI300X"] / 7 == links["MI300A"] / 6


def test_an_unknown_gpu_is_rejected_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as rejected:
        gpu_from_config_name("MI300")
    assert rejected.value.fix.startswith(("cluster.gpu=MI300X", "cluster.gpu=MI300A"))
    assert "hardware.yaml" in rejected.value.rule


def test_a_cluster_may_connect_its_gpus_otherwise() -> None:
    assert machine_from_cluster("A100", 100, link_gbs=12.5).gpu.link_gbs == 12.5
    assert machine_from_cluster("A100", 100).gpu.link_gbs == 300


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_cluster_names_a_gpu_that_is_known_and_says_in_gigabytes_what_a_node_sends(file) -> None:
    said = OmegaConf.load(file)
    assert said.get("gpu") is None or gpu_from_config_name(said.gpu).name == said.gpu
    assert said.get("network_gbs") is None or 10 <= said.network_gbs <= 400  # in GB/s, not in Gb/s
