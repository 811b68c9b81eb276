"""`tfdist run --on kubernetes`: the job as a manifest that Kubernetes, Kubeflow or Compose runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from tfdist.cli import summary
from tfdist.cli.backends.base import Engine, Order
from tfdist.errors import ConfigError
from tfdist.launcher.backends import kubernetes
from tfdist.launcher.backends.kubernetes import JOB_LABEL, ContainerJob
from tfdist.launcher.backends.kubernetes_watch import Kubectl, Watch
from tfdist.launcher.supervisor import stop_requests

__all__ = ["Kubernetes"]

#: The source of a task's place for each kind of manifest, as in `tfdist run --environment`.
_ENVIRONMENTS = {"plain": "kubernetes", "tfjob": "kubernetes", "compose": "tf_config"}

#: Seconds that pods wait for each other by default: nodes may have to fetch the image.
_START_TIMEOUT = "900"

#: For each kind of manifest the objects to look at, and those to remove.
_KINDS = {"plain": "jobs,pods", "tfjob": "tfjobs.kubeflow.org,pods"}
_ALL_KINDS = {"plain": "job,statefulset,service", "tfjob": "tfjob"}


class Kubernetes(Engine):
    """Makes the job in the cluster; a manifest for Compose is printed only.

    Raises:
        ConfigError: for a mistake in the options.
    """

    name = "kubernetes"
    options = (
        *("engine_args", "gpus_per_task", "image", "namespace", "job_name", "manifest"),
        "detach",
    )
    restarts = "a Job that has failed stays so; start it again"
    remedy = "Install it, or take the manifest that --dry-run prints to where it is."
    placement = "Kubernetes places the pods. Give the number of workers with -n instead."

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        _check(order)
        options = order.options
        self._manifest = options.manifest
        self._job = ContainerJob(
            name=options.job_name or kubernetes.name_of(order.request.file_name),
            image=options.image or "",
            command=_command(order),
            counts=order.counts,
            gpus=options.gpus_per_task or 0,
            namespace=options.namespace,
            grace=order.grace,
        )
        where = ("--namespace", options.namespace) if options.namespace is not None else ()
        self._kubectl = Kubectl((*order.engine_arguments(), *where))
        self._selector = f"{JOB_LABEL}={self._job.name}"

    def programs(self) -> tuple[str, ...]:
        """See `Engine`."""
        return () if self._manifest == "compose" else ("kubectl",)

    def text(self) -> str:
        """See `Engine`."""
        return kubernetes.text(self._documents())

    def start(self) -> int:
        """See `Engine`."""
        if self._manifest == "compose":
            print(self.text(), end="")
            summary.note(f"this is the file of: {kubernetes.RUN}")
            return 0
        remove = self._by_hand("delete", _ALL_KINDS[self._manifest])
        with stop_requests() as requests:
            made = self._kubectl.create(kubernetes.in_json(self._documents()))
            summary.note(f"made {', '.join(made)}")
            if self.order.options.detach and not requests.received:
                self._note_detached(remove)
                return 0
            watch = self._watch()
            try:
                status = watch.until_end(lambda: requests.received)
            except BaseException:
                summary.note(f"this removes what is left of the job: {remove}")
                raise
        if not status:
            self._remove(made, remove)
        if status is None:
            by = requests.received[0]
            summary.note(f"stopped by {by.name}; the job is removed from the cluster")
            return 128 + by
        if status:
            self._remove([name for name in made if not _has_ended(name, watch)], remove)
            summary.note(
                f"the pods that ended are kept for their logs; this removes them: {remove}"
            )
        return status

    def _documents(self) -> Sequence[dict[str, Any]]:
        match self._manifest:
            case "plain":
                return kubernetes.documents(self._job)
            case "tfjob":
                return kubernetes.tfjob_documents(self._job)
            case _:
                return (kubernetes.compose_document(self._job),)

    def _watch(self) -> Watch:
        job, plain = self._job, self._manifest == "plain"
        names = kubernetes.jobs(job) if plain else (job.name,)
        pod = f"{names[0]}-0" if plain else f"{job.name}-{job.main}-0"
        kinds = _KINDS[self._manifest]
        return Watch(self._kubectl, kinds, self._selector, names, pod, summary.note)

    def _by_hand(self, action: str, kinds: str) -> str:
        """The command for a shell that does something with all objects of the job."""
        return shlex.join(self._kubectl.command(action, kinds, "-l", self._selector))

    def _remove(self, names: Sequence[str], by_hand: str) -> None:
        problem = self._kubectl.delete(names)
        if problem is not None:
            summary.note(
                f"{', '.join(names)} could not be removed ({problem}). This does: {by_hand}"
            )

    def _note_detached(self, remove: str) -> None:
        summary.note(f"its state: {self._by_hand('get', _KINDS[self._manifest])}")
        if self._manifest == "plain" and self._job.has_servers:
            summary.note(
                "the servers are started again whenever they end, so remove them at the end"
            )
        summary.note(f"this removes it: {remove}")


def _check(order: Order) -> None:
    options = order.options
    if options.manifest not in _ENVIRONMENTS:
        raise ConfigError(
            f"Unknown manifest --manifest {options.manifest!r}. There are: "
            f"{', '.join(_ENVIRONMENTS)}."
        )
    if not options.image:
        raise ConfigError(
            "--on kubernetes needs --image: the container image that has tfdist and, at the path "
            f"{order.request.script!r}, the script."
        )
    if options.manifest != "compose":
        return
    for name in ("namespace", "engine_args", "detach"):
        if getattr(options, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} conflicts with --manifest compose, which is printed "
                "only. Leave one of them out."
            )


def _command(order: Order) -> tuple[str, ...]:
    """The command of every container."""
    request = order.request
    added: list[str] = []
    if order.tasks > 1 and "start_timeout" not in order.resolved.reasons:
        added += ["--start-timeout", _START_TIMEOUT]
    if request.log_dir is not None:
        added += ["--log-dir", str(request.log_dir)]
    environment = _ENVIRONMENTS[order.options.manifest] if order.tasks > 1 else "local"
    tfdist = ("tfdist",) if request.remote_python is None else order.tfdist()
    return (*tfdist, *order.command(environment, *added))


def _has_ended(name: str, watch: Watch) -> bool:
    """Whether an object is a Job that has ended, whose pods stay with their logs."""
    kind, _, own = name.partition("/")
    return kind.startswith(("job.", "tfjob.")) and own in watch.ended
