"""Activations and layers whose outputs depend on one input number each."""

from __future__ import annotations

import keras

__all__ = ["ELEMENTWISE_LAYERS", "is_elementwise", "is_elementwise_layer"]

_NAMES = (
    *("linear", "relu", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish"),
    *("sigmoid", "log_sigmoid", "hard_sigmoid", "hard_silu", "tanh", "hard_tanh", "tanh_shrink"),
    *(
        "soft_shrink",
        "hard_shrink",
        "softplus",
        "softsign",
        "exponential",
        "threshold",
        "squareplus",
    ),
    "sparse_plus",
)

_FUNCTIONS = tuple(filter(None, (getattr(keras.activations, name, None) for name in _NAMES)))

#: Layers without weights that act on each number by itself.
ELEMENTWISE_LAYERS = (
    keras.layers.Activation,
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
)


def is_elementwise(activation: object) -> bool:
    """Whether an activation is one of Keras's that act on each number by itself; None is."""
    return activation is None or any(activation is each for each in _FUNCTIONS)


def is_elementwise_layer(layer: object) -> bool:
    """Whether a layer acts on each number by itself."""
    return isinstance(layer, ELEMENTWISE_LAYERS) and is_elementwise(
        getattr(layer, "activation", None)
    )
