"""Check the predicted step time with cases computed by hand, and that better hardware is never slower."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc.jobs.hardware import GPU, CollectiveEfficiency, Machine, OperationCosts
from hpc.plan import collective_times, traffic
from hpc.plan.collective_times import Group
from hpc.plan.setup import ParallelLayout
from hpc.plan.step_time import operations_seconds, optimizer_seconds, predict_step
from hpc.plan.trace_types import BatchCost, ParameterGroup, Trace, Work

BF16 = {"bf16": 100.0, "fp32": 10.0}
CARD = GPU("card", 40, BF16, 1000, 100, matmul_share=0.5, attention_share=0.25, fixed_gb=1)
NETWORK = CollectiveEfficiency(
    link_share=0.5, node_share=0.5, overlap_share=1.0, start_seconds=0.0, link_hop_seconds=0.0, node_hop_seconds=0.0
)
IDEAL = Machine(CARD, 40.0, NETWORK, OperationCosts(memory_share=0.5, launch_seconds=0.0, fused_share=0.25))
SLOW = replace(IDEAL, network=replace(NETWORK, start_seconds=1e-6, link_hop_seconds=1e-6, node_hop_seconds=1e-5))
SHARDINGS = ["none", "zero1", "zero2", "zero3", "fsdp"]


def product(flops: float, weights: float) -> Work:
    return Work(BatchCost(per_example=flops), BatchCost(weights, 1.0))


def group(name: str, parameters: int = 0, tensors: int = 1) -> ParameterGroup:
    return ParameterGroup(name, parameters, parameters, parameters, tensors, buffer_bytes=0)


def network(flops: float = 1e12, parameters: int = 10**9, blocks: int = 4, reduced: float = 0.0) -> Trace:
    middle = [group(f"block {i}", parameters, 10) for i in range(blocks)]
    forward = (*[product(flops, parameters)] * blocks, product(flops / 2, 10**6))
    sums = [Work(BatchCost(), BatchCost(per_example=reduced), 4)] * blocks if reduced else []
    groups = (group("before", 10**6), *middle, group("after", 10**6))
    return Trace(groups, "tokens", 1024, forward=forward, backward=forward * 2, all_reduced=tuple(sums))


def test_an_operation_takes_its_arithmetic_or_its_bytes_whichever_is_longer() -> None:
    setup = ParallelLayout(1, 1, 2, precision="bf16-true")
    heavy = Work(BatchCost(per_example=5e11), BatchCost(fixed=1.0, per_example=1.0), 3)
    assert operations_seconds([heavy], setup, IDEAL) == pytest.approx(3 * 2 * 5e11 / (0.5 * 100e12))
    light = Work(BatchCost(per_example=1.0), BatchCost(fixed=1e9, per_example=2e9))
    assert operations_seconds([light], setup, IDEAL) == pytest.approx(5e9 / (0.5 * 1e12))


def test_products_without_weights_are_attention() -> None:
    setup = ParallelLayout(1, 1, 1, precision="bf16-true")
    works = [Work(BatchCost(per_example=1e12), BatchCost(fixed, 1.0)) for fixed in (1.0, 0.0)]
    assert operations_seconds(works[1:], setup, IDEAL) == pytest.approx(2 * operations_seconds(works[:1], setup, IDEAL))


def test_compiling_fuses_what_has_no_flops() -> None:
    eager, compiled = (ParallelLayout(1, 1, 1, precision="bf16-true", compile=compile) for compile in (False, True))
    moves, counts = Work(BatchCost(), BatchCost(per_example=1e9)), product(1e12, 1)
    assert operations_seconds([moves], compiled, IDEAL) == pytest.approx(
        0.25 * operations_seconds([moves], eager, IDEAL)
    )
    assert operations_seconds([counts], compiled, IDEAL) == operations_seconds([counts], eager, IDEAL)


def test_what_a_gpu_has_no_units_for_is_computed_in_fp32() -> None:
    old = replace(IDEAL, gpu=replace(CARD, tflops={"fp32": 10.0}))
    setup = ParallelLayout(1, 1, 1, precision="bf16-mixed")
    seconds = [operations_seconds([product(1e12, 1)], setup, machine) for machine in (IDEAL, old)]
    assert seconds[1] == pytest.approx(10 * seconds[0])


def test_a_ring_within_a_node() -> None:
    """Compute by hand: 7 of 8 parts in 7 steps, over half of 100 GB/s."""
    assert collective_times.gather_seconds(8e9, Group(8, 1, 8), IDEAL) == pytest.approx(7e9 / 50e9)
    assert collective_times.gather_seconds(8e9, Group(8, 1, 8), SLOW) == pytest.approx(7e9 / 50e9 + 1e-6 + 7e-6)


def test_a_ring_over_nodes_leaves_each_node_once() -> None:
    """Compute by hand: 31 of 32 parts over half of 40 GB/s; 3 of the 31 steps go to another node."""
    group = Group(32, 1, 8)
    assert group.num_nodes == 4
    assert collective_times.gather_seconds(32e9, group, IDEAL) == pytest.approx(31e9 / 20e9)
    assert collective_times.gather_seconds(0.032, group, SLOW) == pytest.approx(1e-6 + 28e-6 + 3e-5)


def test_groups_that_leave_the_same_nodes_share_the_network() -> None:
    alone, one_of_four = Group(4, 1, 1), Group(4, 4, 4)
    assert one_of_four.num_nodes == alone.num_nodes == 4
    assert collective_times.gather_seconds(4e9, one_of_four, IDEAL) == pytest.approx(
        4 * collective_times.gather_seconds(4e9, alone, IDEAL)
    )


def test_an_all_reduce_is_two_gathers_and_by_tree_where_messages_are_small() -> None:
    few, many = Group(16, 1, 8), Group(8192, 1, 8)
    assert collective_times.all_reduce_seconds(1e9, few, IDEAL) == pytest.approx(
        2 * collective_times.gather_seconds(1e9, few, IDEAL)
    )
    assert collective_times.all_reduce_seconds(1.0, many, SLOW) == pytest.approx(
        1e-6 + 2 * (7e-6 + 10 * 1e-5), rel=1e-3
    )


@pytest.mark.parametrize(("sharding", "volume"), [("none", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3), ("fsdp", 3)])
def test_full_sharding_sends_half_as_much_again_as_data_parallelism(sharding: str, volume: int) -> None:
    """Check that full sharding sends three times the parameters, not twice (arXiv 1910.02054, section 7.2).

    FSDP keeps the last block of four.
    """
    trace, setup = (
        network(parameters=10**9),
        ParallelLayout(2, 8, 1, sharding=sharding, precision="bf16-true", overlap=False),
    )
    bandwidth = collective_times.ring_bandwidth(traffic.data_parallel_group(setup), IDEAL)
    sent = predict_step(trace, setup, IDEAL).communication * bandwidth / (15 / 16)
    kept = 2e9 if sharding == "fsdp" else 0
    assert sent == pytest.approx(2 * trace.num_parameters * volume - kept, rel=1e-6)


def test_zero3_waits_for_each_tensor_and_fsdp_for_each_block() -> None:
    """Check latency alone, with parameters of only a few numbers."""
    trace = network(parameters=10)
    setups = [
        ParallelLayout(128, 8, 1, sharding=kind, precision="bf16-true", overlap=False) for kind in ("zero3", "fsdp")
    ]
    blocks = [traffic.forward_gathers_time(replace(trace, groups=trace.blocks), setup, SLOW).total for setup in setups]
    assert blocks[0] == pytest.approx(10 * blocks[1], rel=1e-3)


def test_zero3_with_small_micro_batches_collapses() -> None:
    """Check the reason for table 2 of arXiv 2104.04473.

    A GPU's compute shrinks with the batch, but the parameters that it gathers do not.
    """
    trace = network(flops=1e13)
    few, many = (
        [
            predict_step(
                trace, ParallelLayout(nodes, 8, micro, sharding="zero3", precision="bf16-true", overlap=False), SLOW
            )
        ][0]
        for nodes, micro in ((48, 4), (192, 1))
    )
    assert many.compute == pytest.approx(few.compute / 4) and many.communication > few.communication


def test_ddp_and_zero1_communicate_once_a_step_and_the_others_at_each_micro_batch() -> None:
    for sharding in SHARDINGS:
        once, often = (
            predict_step(
                network(),
                ParallelLayout(2, 8, 1, times, sharding=sharding, precision="bf16-true", overlap=False),
                IDEAL,
            )
            for times in (1, 4)
        )
        times = often.communication / once.communication
        assert times == pytest.approx(1) if sharding in ("none", "zero1") else times > 2


def test_communication_hides_behind_computation_but_for_its_end() -> None:
    setup = ParallelLayout(2, 8, 1, sharding="fsdp", precision="bf16-true")
    longer = predict_step(network(flops=1e15), setup, IDEAL)
    first, last = (
        traffic.forward_gathers_time(network(), setup, IDEAL).end,
        traffic.backward_collectives_time(network(), setup, IDEAL).end,
    )
    assert longer.communication == pytest.approx(first + last)
    half = replace(IDEAL, network=replace(NETWORK, overlap_share=0.5))
    all_of_it = predict_step(network(flops=1e15), replace(setup, overlap=False), IDEAL).communication
    assert predict_step(network(flops=1e15), setup, half).communication == pytest.approx(all_of_it / 2)


def test_tensor_parallel_ranks_wait_for_each_other() -> None:
    trace = network(reduced=1e9, parameters=0)
    setup = ParallelLayout(1, 8, 1, tensor_parallel=8, precision="bf16-true")
    sums = 16 * collective_times.all_reduce_seconds(1e9, Group(8, 1, 8), IDEAL)
    assert predict_step(trace, setup, IDEAL).communication == pytest.approx(sums)


def test_the_flops_are_three_times_those_of_forward() -> None:
    assert predict_step(network(), ParallelLayout(1, 1, 2, 3, precision="bf16-true"), IDEAL).flops == 3 * 2 * 3 * 4.5e12


MACHINES = st.builds(
    lambda peak, memory, link, node, hidden, hop: Machine(
        replace(CARD, tflops={"bf16": peak, "fp32": peak / 8}, bandwidth_gbs=memory, link_gbs=link),
        node,
        replace(NETWORK, overlap_share=hidden, start_seconds=hop, link_hop_seconds=hop, node_hop_seconds=3 * hop),
        IDEAL.operations,
    ),
    st.floats(1, 1e4), st.floats(10, 1e4), st.floats(1, 1e3), st.floats(1, 1e3), st.floats(0, 1), st.floats(0, 1e-4),
)  # fmt: skip
SETUPS = st.builds(
    ParallelLayout,
    nodes=st.sampled_from([1, 2, 64]),
    devices=st.sampled_from([1, 4, 8]),
    micro_batch=st.integers(1, 8),
    accumulate=st.integers(1, 4),
    sharding=st.sampled_from(SHARDINGS),
    precision=st.sampled_from(["bf16-mixed", "bf16-true", "32-true"]),
    checkpointing=st.booleans(),
    compile=st.booleans(),
    overlap=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(MACHINES, SETUPS, st.sampled_from(["gpu.bandwidth_gbs", "gpu.link_gbs", "node_gbs", "gpu.tflops", "hop"]))
def test_better_hardware_is_never_slower(one: Machine, setup: ParallelLayout, what: str) -> None:
    trace = network(flops=1e11, parameters=10**7)
    better = {
        "gpu.bandwidth_gbs": lambda: replace(one, gpu=replace(one.gpu, bandwidth_gbs=2 * one.gpu.bandwidth_gbs)),
        "gpu.link_gbs": lambda: replace(one, gpu=replace(one.gpu, link_gbs=2 * one.gpu.link_gbs)),
        "gpu.tflops": lambda: replace(
            one, gpu=replace(one.gpu, tflops={key: 2 * value for key, value in one.gpu.tflops.items()})
        ),
        "node_gbs": lambda: replace(one, node_gbs=2 * (one.node_gbs or 1)),
        "hop": lambda: replace(
            one, network=replace(one.network, node_hop_seconds=0.0, link_hop_seconds=0.0, start_seconds=0.0)
        ),
    }[what]()
    before, after = predict_step(trace, setup, one), predict_step(trace, setup, better)
    assert after.seconds <= before.seconds * (1 + 1e-9)
    assert min(before.compute, before.communication, before.optimizer) >= 0


def test_zero_updates_copies_in_fp32():
    setup = ParallelLayout(1, 8, 1, sharding="zero1", precision="bf16-true")
    assert optimizer_seconds(network(), setup, IDEAL) == optimizer_seconds(
        network(), replace(setup, precision="bf16-mixed"), IDEAL
    )
    fsdp = replace(setup, sharding="fsdp")
    assert 2 * optimizer_seconds(network(), fsdp, IDEAL) == optimizer_seconds(network(), setup, IDEAL)
