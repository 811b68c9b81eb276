"""Private TensorFlow symbols of feature columns, checked on TensorFlow 2.21.

`tf.compat.v1.feature_column.input_layer` and `linear_model` go through the columns' deprecated
methods, with a warning for each, and know no `tf.feature_column.shared_embeddings`. The methods
that took their place are public, but ask for these.
"""

from __future__ import annotations

from tensorflow.python.feature_column.feature_column_v2 import (
    CategoricalColumn,
    DenseColumn,
    FeatureTransformationCache,
    SharedEmbeddingColumn,
    StateManager,
)

__all__ = [
    "CategoricalColumn",
    "DenseColumn",
    "FeatureTransformationCache",
    "SharedEmbeddingColumn",
    "StateManager",
]
