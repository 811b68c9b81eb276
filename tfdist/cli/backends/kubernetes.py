"""`tfdist run --on kubernetes`: the job as a manifest that Kubernetes, Kubeflow or Compose runs."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from typing import Any

from tfdist.cli import summary
from tfdist.cli.backends.request import Order
from tfdist.errors import ConfigError
from tfdist.launch.backends import kubernetes
from tfdist.launch.backends.kubernetes import JOB_LABEL, ContainerJob
from tfdist.launch.backends.kubernetes_watch import Kubectl, Target, Watch
from tfdist.launch.supervisor import stop_requests

__all__ = ["container_job", "documents", "start"]

#: The source of a task's place for each kind of manifest, as in `tfdist run --environment`.
_TOLD_BY = {"plain": "kubernetes", "tfjob": "kubernetes", "compose": "tf_config"}

#: Seconds that pods wait for each other by default: nodes may have to fetch the image.
_START_TIMEOUT = "900"

_KINDS = {"plain": "jobs,pods", "tfjob": "tfjobs.kubeflow.org,pods"}
_ALL_KINDS = {"plain": "job,statefulset,service", "tfjob": "tfjob"}


def start(order: Order) -> int:
    """Makes the job in the cluster and stays until its end; the exit status is the job's.

    With `--dry-run` and for Compose, it prints the manifest and makes nothing.

    Raises:
        ConfigError: for a mistake in the options, or if `kubectl` is missing.
        StartError: if the cluster does not take the job, or is not heard of any more.
    """
    job = container_job(order)
    wanted = documents(order, job)
    if order.dry_run or order.options.manifest == "compose":
        print(kubernetes.text(wanted), end="")
        if not order.dry_run:
            summary.note(f"this is the file of: {kubernetes.RUN}")
        return 0
    if shutil.which("kubectl") is None:
        raise ConfigError(
            "--on kubernetes needs kubectl, which is not in PATH. Install it, or take the manifest "
            "that --dry-run prints to where it is."
        )
    return _run(order, job, kubernetes.in_json(wanted))


def documents(order: Order, job: ContainerJob) -> Sequence[dict[str, Any]]:
    """The manifest of a job.

    Args:
        order: names the kind of manifest.
        job: the job to run, by `container_job`.
    """
    match order.options.manifest:
        case "plain":
            return kubernetes.documents(job)
        case "tfjob":
            return kubernetes.tfjob_documents(job)
        case _:
            return (kubernetes.compose_document(job),)


def container_job(order: Order) -> ContainerJob:
    """The job to run in containers.

    Raises:
        ConfigError: for a mistake in the options.
    """
    options = order.options
    _check(order)
    return ContainerJob(
        name=options.job_name or kubernetes.name_of(order.request.script),
        image=options.image or "",
        command=_command(order),
        counts=order.counts,
        gpus=options.gpus_per_task or 0,
        namespace=options.namespace,
        grace=order.grace,
    )


def _command(order: Order) -> tuple[str, ...]:
    """The command of every container."""
    request, config = order.request, order.resolved
    added: list[str] = []
    if order.tasks > 1 and "start_timeout" not in config.reasons:
        added += ["--start-timeout", _START_TIMEOUT]
    if request.log_dir is not None:
        added += ["--log-dir", str(request.log_dir)]
    told_by = _TOLD_BY[order.options.manifest] if order.tasks > 1 else "local"
    python = request.remote_python
    tfdist = ("tfdist",) if python is None else (python, "-m", "tfdist.cli.main")
    return (*tfdist, *order.command(told_by, *added))


def _check(order: Order) -> None:
    options, request = order.options, order.request
    if options.manifest not in _TOLD_BY:
        raise ConfigError(
            f"Unknown manifest --manifest {options.manifest!r}. There are: {', '.join(_TOLD_BY)}."
        )
    if not options.image:
        raise ConfigError(
            "--on kubernetes needs --image: the container image that has tfdist and, at the path "
            f"{request.script!r}, the script."
        )
    if request.hosts is not None or request.hostfile is not None:
        raise ConfigError(
            "--on kubernetes conflicts with --hosts and --hostfile: Kubernetes places the pods. "
            "Give the number of workers with -n instead."
        )
    if options.manifest != "compose":
        return
    for name in ("namespace", "engine_args", "detach"):
        if getattr(options, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} conflicts with --manifest compose, which is printed "
                "only. Leave one of them out."
            )


def _run(order: Order, job: ContainerJob, manifest: str) -> int:
    where = ("--namespace", job.namespace) if job.namespace is not None else ()
    kubectl = Kubectl((*order.engine_arguments(), *where))
    remove = shlex.join(
        kubectl.command(
            "delete", _ALL_KINDS[order.options.manifest], "-l", f"{JOB_LABEL}={job.name}"
        )
    )
    with stop_requests() as requests:
        made = kubectl.create(manifest)
        summary.note(f"made {', '.join(made)}")
        if order.options.detach and not requests.received:
            _say_detached(job, kubectl, order.options.manifest, remove)
            return 0
        watch = Watch(kubectl, _target(order, job), summary.note)
        try:
            status = watch.until_end(lambda: requests.received)
        except BaseException:
            summary.note(f"this removes what is left of the job: {remove}")
            raise
    if status is None:
        _remove(kubectl, made, remove)
        summary.note(f"stopped by {requests.received[0].name}; the job is removed from the cluster")
        return 128 + requests.received[0]
    if status == 0:
        _remove(kubectl, made, remove)
        return 0
    _remove(kubectl, [name for name in made if not _has_ended(name, watch)], remove)
    summary.note(f"the pods that ended are kept for their logs; this removes them: {remove}")
    return status


def _target(order: Order, job: ContainerJob) -> Target:
    """The objects to look at while the job runs."""
    plain = order.options.manifest == "plain"
    names = kubernetes.jobs(job) if plain else (job.name,)
    return Target(
        kinds=_KINDS[order.options.manifest],
        selector=f"{JOB_LABEL}={job.name}",
        jobs=names,
        pod=f"{names[0]}-0" if plain else f"{job.name}-{job.main}-0",
    )


def _has_ended(name: str, watch: Watch) -> bool:
    """Whether an object is a Job that has ended, whose pods stay with their logs."""
    kind, _, own = name.partition("/")
    return kind.startswith(("job.", "tfjob.")) and own in watch.ended


def _remove(kubectl: Kubectl, names: Sequence[str], by_hand: str) -> None:
    problem = kubectl.delete(names)
    if problem is not None:
        summary.note(f"{', '.join(names)} could not be removed ({problem}). This does: {by_hand}")


def _say_detached(job: ContainerJob, kubectl: Kubectl, manifest: str, remove: str) -> None:
    kinds = _KINDS[manifest]
    look = shlex.join(kubectl.command("get", kinds, "-l", f"{JOB_LABEL}={job.name}"))
    summary.note(f"its state: {look}")
    if manifest == "plain" and job.served:
        summary.note("the servers are started again whenever they end, so remove them at the end")
    summary.note(f"this removes it: {remove}")
