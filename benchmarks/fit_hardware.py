"""Fit the constants of hardware.yaml to the rows of published.yaml that are marked `fit`, and print them.

It minimizes the squares of the relative errors, by steps along one constant after the other. It writes nothing.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from published import PublishedRun, baked_project, predict, read_runs, relative_error

# For A100, for H100, for all. The other constants come from the sources in the comments of hardware.yaml.
START = {
    "A100 matmul_share": 0.8, "A100 attention_share": 0.5, "H100 matmul_share": 0.8, "H100 attention_share": 0.5,
    "memory_share": 0.8, "node_share": 0.5, "overlap_share": 0.5,
}  # fmt: skip


def main() -> None:
    with baked_project():
        constants = fit_constants([run for run in read_runs() if run.is_fitted])
    for name, value in constants.items():
        print(f"{name:24} {value:.3f}")


def fit_constants(runs: Sequence[PublishedRun]) -> dict[str, float]:
    """Return the constants with the smallest mean squared error on these runs."""
    constants, step = dict(START), 0.1
    while step > 0.004:
        neighbours = [_move(constants, name, by) for name in START for by in (step, -step)]
        best = min(neighbours, key=lambda neighbour: mean_squared_error(neighbour, runs))
        if mean_squared_error(best, runs) < mean_squared_error(constants, runs):
            constants = best
        else:
            step /= 2
    return constants


def mean_squared_error(constants: dict[str, float], runs: Sequence[PublishedRun]) -> float:
    adjust = adjuster(constants)
    return statistics.mean(relative_error(run, predict(run, adjust)) ** 2 for run in runs)


def adjuster(constants: dict[str, float]) -> Callable[[Any], Any]:
    """Return a function that returns a machine with these constants."""

    def adjust(machine: Any) -> Any:
        kind = machine.gpu.name[:4]
        gpu = {key: constants[f"{kind} {key}"] for key in ("matmul_share", "attention_share")}
        network = {key: constants[key] for key in ("node_share", "overlap_share")}
        return replace(
            machine,
            gpu=replace(machine.gpu, **gpu),
            network=replace(machine.network, **network),
            operations=replace(machine.operations, memory_share=constants["memory_share"]),
        )

    return adjust


def _move(constants: dict[str, float], name: str, by: float) -> dict[str, float]:
    return constants | {name: min(1.0, max(0.05, constants[name] + by))}


if __name__ == "__main__":
    main()
