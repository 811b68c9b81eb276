"""tfdist's own servers and strategy, for the peers that use them."""

from __future__ import annotations

from typing import Any

from bench.job import Job
from tfdist import environment
from tfdist.config.strategy_config import StrategyConfig

__all__ = ["make_strategy", "serve"]


def make_strategy(job: Job) -> Any:
    """tfdist's strategy on the cluster of TF_CONFIG. To be made before Keras is imported."""
    import tfdist

    return tfdist.strategy("parameter_server", **_options(job))


def serve(job: Job) -> None:
    """Runs tfdist's server of this task until the chief has gone."""
    from tfdist.cli import server

    config = StrategyConfig.of(strategy="parameter_server", **_options(job))
    with environment.patched({"TFDIST_CONFIG": config.to_json()}):
        server.main([])


def _options(job: Job) -> dict[str, Any]:
    return {"mode": "async", "processes": job.workers, "ps": job.ps, **job.options}
