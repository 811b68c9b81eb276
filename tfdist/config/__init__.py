from tfdist.utils.lazy import lazy_attributes

__all__ = ["STRATEGIES", "StrategyConfig"]

__getattr__, __dir__ = lazy_attributes(
    __all__, dict.fromkeys(__all__, "tfdist.config.strategy_config")
)
