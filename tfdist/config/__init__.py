"""Options of strategies: their types, bounds and help, and the files that hold them."""

from tfdist.utils.imports import lazy_attributes

__all__ = [
    "STRATEGIES",
    "GradientOptions",
    "HorovodOptions",
    "PipelineOptions",
    "ServerOptions",
    "StrategyConfig",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "STRATEGIES": "tfdist.config.strategy_config",
        "GradientOptions": "tfdist.config.gradient_options",
        "HorovodOptions": "tfdist.config.horovod_options",
        "PipelineOptions": "tfdist.config.pipeline_options",
        "ServerOptions": "tfdist.config.server_options",
        "StrategyConfig": "tfdist.config.strategy_config",
    },
)
