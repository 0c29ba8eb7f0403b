"""Fits the constants of hardware.yaml to the few rows of published.yaml that are marked so, and prints them.

Least squares of the relative error, by steps along one constant after the other. Nothing is written.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from published import Run, error, predicted, project, runs

# Of A100, of H100, of all. What is not here is taken from where its comment says.
START = {
    "A100 matmul_share": 0.8, "A100 attention_share": 0.5, "H100 matmul_share": 0.8, "H100 attention_share": 0.5,
    "memory_share": 0.8, "node_share": 0.5, "overlap_share": 0.5,
}  # fmt: skip


def main() -> None:
    with project():
        chosen = [run for run in runs() if run.fitted]
        constants = fitted(chosen)
    for name, value in constants.items():
        print(f"{name:24} {value:.3f}")


def fitted(chosen: Sequence[Run]) -> dict[str, float]:
    constants, step = dict(START), 0.1
    while step > 0.004:
        moved = min(
            (_moved(constants, name, by) for name in START for by in (step, -step)), key=lambda c: off(c, chosen)
        )
        if off(moved, chosen) < off(constants, chosen):
            constants = moved
        else:
            step /= 2
    return constants


def off(constants: dict[str, float], chosen: Sequence[Run]) -> float:
    return statistics.mean(error(run, predicted(run, adjusted(constants))) ** 2 for run in chosen)


def adjusted(constants: dict[str, float]) -> Callable[[Any], Any]:
    def adjust(machine: Any) -> Any:
        kind = machine.gpu.name[:4]
        gpu = {key: constants[f"{kind} {key}"] for key in ("matmul_share", "attention_share")}
        return replace(
            machine,
            gpu=replace(machine.gpu, **gpu),
            network=replace(
                machine.network, node_share=constants["node_share"], overlap_share=constants["overlap_share"]
            ),
            operations=replace(machine.operations, memory_share=constants["memory_share"]),
        )

    return adjust


def _moved(constants: dict[str, float], name: str, by: float) -> dict[str, float]:
    return constants | {name: min(1.0, max(0.05, constants[name] + by))}


if __name__ == "__main__":
    main()
