"""Runs of a job array that share a node, where a job gets whole nodes and a run uses some of the GPUs of one."""

from dataclasses import replace

from hpc.config.sections import ClusterConfig
from hpc.jobs.job import Job, fill_in_sizes


def share_node(job: Job, cluster: ClusterConfig) -> Job:
    """Return the job of an array that has as many runs at once as a node has GPUs for, and requests the whole node.

    Where nodes are not given whole, a run needs more than half a node, or the scheduler is PBS, which has no steps with
    GPUs of their own, each run keeps a job of its own.
    """
    num_gpus, at_most = job.gpus_per_node, min(job.num_members, job.at_once or job.num_members)
    if not (cluster.whole_nodes and cluster.scheduler == "slurm" and job.nodes == 1 and num_gpus):
        return job
    runs_per_node = min(job.all_gpus_per_node // num_gpus, at_most)
    if runs_per_node < 2:
        return job
    sizes = {"gpus": job.all_gpus_per_node, "cores": (job.cores_per_task or 1) * job.all_gpus_per_node}
    sizes |= {"nodes": 1, "tasks": job.tasks_per_node * runs_per_node, "ranks": job.tasks_per_node * runs_per_node}
    return replace(
        job,
        runs_per_node=runs_per_node,
        idle_gpus_per_node=job.all_gpus_per_node - num_gpus * runs_per_node,
        request=fill_in_sizes("cluster.request", cluster.request, sizes) if cluster.request else None,
        step_request=job.request or f"--gres=gpu:{num_gpus}",
        memory_gb=cluster.memory_gb,
        is_exclusive=cluster.exclusive,
    )
