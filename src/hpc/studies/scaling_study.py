"""A scaling study: check all points, and submit those that have no run. A report of its folder shows the results."""

import shlex
import sys
from collections.abc import Sequence

from hpc.config.errors import ConfigError
from hpc.run import frozen_config
from hpc.studies import scaling_file, scaling_points
from hpc.studies.scaling_points import ScalingPoint
from hpc.submit import queue_run
from hpc.submit.options import SubmitOptions

# Sections of the config that do not change what a run measures: of the cluster, only another name does.
UNCOMPARED = ("run_dir", "cluster", "force", "dirty_tree")


def run_study(words: Sequence[str], *, dry_run: bool = False) -> int:
    """Submit the points that a command line asks for, and return the exit code. Called again, it continues.

    Args:
        dry_run: print the points and the first job, and write nothing.

    Returns:
        0: all points have a run; 130: interrupted by Ctrl-C.

    Raises:
        ConfigError: a point cannot run, or the folder holds something else. Points before it are queued.
    """
    study = scaling_points.parse_study(words)
    folder = scaling_points.study_folder(study)
    known = scaling_file.load_points(folder)
    # All points of the folder, as the report compares them: in weak scaling the first one gives the batch of a device.
    points = scaling_points.compose_points(study, folder, also=[point.nodes for point in known])
    reject_other_study(points)
    asked = [point for point in points if point.num_nodes in study.nodes]
    if dry_run:
        print("\n".join(f"{point.name}: {_format_sizes(point)}" for point in asked), flush=True)
        queue_run.submit_run(asked[0].cfg.node, asked[0].overrides, options=SubmitOptions(dry_run=True))
        return 0
    try:
        for point in asked:
            _submit(point)
            scaling_file.save_points(folder, [point.sizes for point in points])
    except KeyboardInterrupt:
        command = shlex.join(["python", "tools/scale.py", *words])
        print(f"\ninterrupted: queued jobs keep running; to submit the others, type\n  {command}", file=sys.stderr)
        return 130
    print(f"the results, once jobs have ended: python report.py {shlex.quote(str(folder))}")
    return 0


def reject_other_study(points: Sequence[ScalingPoint]) -> None:
    """Raise `ConfigError` if the run directory of a point holds a run of another config."""
    for point in points:
        lines = frozen_config.list_changes(point.run_dir, point.cfg.node) if _has_run(point) else []
        changes = [line for line in lines if _is_compared(line.partition(":")[0])]
        if changes:
            rule = f"must be empty or hold this study, but {point.name} was submitted with another config"
            fix = "out=<a new folder>"
            raise ConfigError("out", point.run_dir.parent, f"{rule} ({'; '.join(changes[:3])})", fix)


def _is_compared(key: str) -> bool:
    return key == "cluster.name" or key.split(".")[0] not in UNCOMPARED


def _submit(point: ScalingPoint) -> None:
    """Submit a point, unless it has a run already."""
    if _has_run(point):
        retry = f"python submit.py resume={shlex.quote(str(point.run_dir))}"
        print(f"{point.name}: it has a run already (to go on with it if it has failed: {retry})", flush=True)
        return
    print(f"{point.name}:", flush=True)
    try:
        queue_run.submit_run(point.cfg.node, point.overrides, options=SubmitOptions())
    except ConfigError as error:
        if error.key != "run_dir":  # the study has set it, from out=
            raise
        raise ConfigError("out", error.value, error.rule, "out=<a new folder>, or remove what is there") from None


def _has_run(point: ScalingPoint) -> bool:
    return (point.run_dir / "job.sh").exists()


def _format_sizes(point: ScalingPoint) -> str:
    sizes = point.sizes
    batch = "the batch of its loaders" if sizes.global_batch_size is None else f"{sizes.global_batch_size} samples"
    return f"{sizes.devices} devices, {batch} in a step, run directory {point.run_dir}"
