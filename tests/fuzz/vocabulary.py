"""What programs are made of: tables of Keras expressions, as they stand in a script.

Numbers are chosen so that rounding stays far below a real difference. Optimizers that divide by a
moment have `epsilon=1e-3`: with Keras's 1e-7 a gradient that is zero but for rounding would become
a step of full size. For the same reason there is no bias before a normalization or in the keys of
an attention: its gradient is zero by nature, and an optimizer of signs or of norms (Lion, Lamb,
Adafactor, Muon) would make a step of its rounding.
"""

from __future__ import annotations

import dataclasses
import textwrap


@dataclasses.dataclass(frozen=True)
class Part:
    """Some hidden layers that come one after the other.

    Attributes:
        takes: the kind of tensor that goes in: `flat`, `series`, `image` or `ids`.
        gives: the kind that comes out.
        layers: expressions, one a layer.
    """

    takes: str
    gives: str
    layers: tuple[str, ...]


def _flat(*layers: str) -> Part:
    return Part("flat", "flat", layers)


def _series(*layers: str, gives: str = "series") -> Part:
    return Part("series", gives, layers)


def _image(*layers: str, gives: str = "image") -> Part:
    return Part("image", gives, layers)


PARTS: dict[str, Part] = {
    "dense": _flat("layers.Dense(6, 'tanh')"),
    "wide": _flat("layers.Dense(24, 'gelu')"),
    "relu": _flat("layers.Dense(8, use_bias=False)", "layers.ReLU()"),
    "prelu": _flat("layers.Dense(6)", "layers.PReLU()"),
    "einsum": _flat("layers.EinsumDense('bf,fg->bg', output_shape=5, bias_axes='g')"),
    "decayed": _flat(
        "layers.Dense(6, 'tanh', kernel_regularizer='l2', bias_regularizer=keras.regularizers.L1())"
    ),
    "activity": _flat("layers.Dense(6, 'tanh', activity_regularizer='l2')"),
    "regularized": _flat("layers.ActivityRegularization(l2=0.01)"),
    "constrained": _flat(
        "layers.Dense(6, 'tanh', kernel_constraint=keras.constraints.MaxNorm(1.))"
    ),
    "orthogonal": _flat(
        "layers.Dense(4, kernel_regularizer=keras.regularizers.OrthogonalRegularizer())"
    ),
    "frozen": _flat("layers.Dense(6, 'tanh', trainable=False)"),
    "batch_norm": _flat(
        "layers.Dense(6, use_bias=False)", "layers.BatchNormalization(synchronized=True)"
    ),
    "batch_norm_fast": _flat(
        "layers.Dense(6, use_bias=False)",
        "layers.BatchNormalization(momentum=0.7, synchronized=True, center=False)",
    ),
    "layer_norm": _flat("layers.Dense(6, use_bias=False)", "layers.LayerNormalization()"),
    "rms_norm": _flat("layers.Dense(6)", "layers.RMSNormalization()"),
    "unit_norm": _flat("layers.Dense(6)", "layers.UnitNormalization()"),
    "group_norm": _flat("layers.Dense(6)", "layers.GroupNormalization(2)"),
    "spectral": _flat("layers.SpectralNormalization(layers.Dense(6))"),
    "dropout_0": _flat("layers.Dropout(0.0)"),
    "noise_0": _flat("layers.GaussianNoise(0.0)"),
    "rescaling": _flat("layers.Rescaling(0.5, offset=0.1)"),
    "lambda": _flat("layers.Lambda(lambda x: x * keras.ops.sigmoid(x))"),
    "shared": _flat("layers.Dense(6)", "Twice(layers.Dense(6, 'tanh'))"),
    "residual": _flat("Residual()"),
    "nested": _flat("keras.Sequential([layers.Dense(6, 'tanh'), layers.Dense(5)])"),
    "nested_norm": _flat(
        "keras.Sequential([layers.Dense(6, use_bias=False), "
        "layers.BatchNormalization(synchronized=True)])"
    ),
    "add_mean": _flat("AddMean()"),
    "add_sum": _flat("AddSum()"),
    "add_weights": _flat("AddWeights()"),
    "counter": _flat("Counter()"),
    "moving": _flat("Moving()"),
    "seen": _flat("Seen()"),
    "kept": _flat("Kept()"),
    "experts": _flat("Experts()"),
    "clips_back": _flat("layers.Dense(6)", "ClipsBack()"),
    "faded": _flat("AddFaded()"),
    "reshaped": _flat("layers.Dense(12)", "layers.Reshape((3, 4))", "layers.Flatten()"),
    "few_ids": Part("ids", "series", ("layers.Embedding(50, 5)",)),
    "masked_ids": Part("ids", "series", ("layers.Embedding(50, 5, mask_zero=True)",)),
    "wide_ids": Part("ids", "series", ("layers.Embedding(3000, 4)",)),
    "positions": Part("ids", "series", ("TokenAndPosition(50, 12, 6)",)),
    "tied_ids": Part("ids", "series", ("Tied(50, 5)",)),
    "hot_ids": Part("ids", "flat", ("layers.CategoryEncoding(50, output_mode='count')",)),
    "decayed_ids": Part("ids", "series", ("layers.Embedding(50, 5, embeddings_regularizer='l2')",)),
    "conv1d": _series("layers.Conv1D(5, 3, padding='same', activation='tanh')"),
    "causal": _series("layers.Conv1D(5, 2, padding='causal', dilation_rate=2)"),
    "conv1d_norm": _series(
        "layers.Conv1D(5, 3, padding='same', use_bias=False)",
        "layers.BatchNormalization(synchronized=True)",
    ),
    "lstm": _series("layers.LSTM(5)", gives="flat"),
    "lstm_series": _series("layers.LSTM(5, return_sequences=True)"),
    "gru": _series("layers.GRU(5)", gives="flat"),
    "gru_unrolled": _series("layers.GRU(4, unroll=True)", gives="flat"),
    "rnn": _series("layers.SimpleRNN(5)", gives="flat"),
    "rnn_cells": _series("layers.RNN([layers.LSTMCell(4), layers.GRUCell(5)])", gives="flat"),
    "bidirectional": _series("layers.Bidirectional(layers.LSTM(4))", gives="flat"),
    "distributed": _series("layers.TimeDistributed(layers.Dense(5, 'tanh'))"),
    "dense_series": _series("layers.Dense(5, 'tanh')"),
    "attention": _series("SelfAttention(layers.MultiHeadAttention(2, 3, use_bias=False))"),
    "causal_attention": _series(
        "SelfAttention(layers.MultiHeadAttention(2, 3, use_bias=False), use_causal_mask=True)"
    ),
    "grouped": _series("SelfAttention(layers.GroupQueryAttention(4, 4, 2, use_bias=False))"),
    "luong": _series("SelfAttention(layers.Attention(use_scale=True))"),
    "layer_norm_series": _series("layers.LayerNormalization()"),
    "max_series": _series("layers.GlobalMaxPooling1D()", gives="flat"),
    "conv_lstm": _image(
        "layers.Reshape((3, 12, 2))", "layers.ConvLSTM1D(3, 2)", "layers.Flatten()", gives="flat"
    ),
    "conv2d": _image("layers.Conv2D(3, 3, padding='same', activation='tanh')"),
    "conv2d_norm": _image(
        "layers.Conv2D(3, 3, padding='same', use_bias=False)",
        "layers.BatchNormalization(synchronized=True)",
        "layers.ReLU()",
    ),
    "depthwise": _image("layers.DepthwiseConv2D(3, padding='same')"),
    "separable": _image("layers.SeparableConv2D(3, 3, padding='same')"),
    "transposed": _image("layers.Conv2DTranspose(3, 3, padding='same')"),
    "group_norm2d": _image("layers.GroupNormalization(1)"),
    "pool": _image("layers.MaxPooling2D(2, padding='same')"),
    "average": _image("layers.AveragePooling2D(2, padding='same')"),
    "rotation_0": _image("layers.RandomRotation(0.0)"),
    "flip_0": _image("layers.RandomTranslation(0.0, 0.0)"),
    "crop": _image("layers.CenterCrop(4, 4)"),
    "resize": _image("layers.Resizing(4, 4)"),
    "pad": _image("layers.ZeroPadding2D(1)"),
    "spatial_0": _image("layers.SpatialDropout2D(0.0)"),
    "flatten": _image("layers.Flatten()", gives="flat"),
}

#: How a kind of tensor becomes a flat one before the heads, and ids a series.
FLATTENING = {
    "flat": (),
    "series": ("layers.GlobalAveragePooling1D()",),
    "image": ("layers.GlobalAveragePooling2D()",),
    "ids": ("layers.Embedding(50, 5)", "layers.GlobalAveragePooling1D()"),
}

#: Parts whose layers a pipeline would compute otherwise, since it takes a batch in microbatches.
OF_THE_BATCH = (
    "batch_norm",
    "batch_norm_fast",
    "nested_norm",
    "conv1d_norm",
    "conv2d_norm",
)

#: Kinds of input: what its tensors are, the shape of an example, and how an array of n is made.
DATA: dict[str, tuple[str, str, str]] = {
    "table": ("flat", "(8,)", "rng.normal(size=({n}, 8)).astype('float32')"),
    "series": ("series", "(5, 4)", "rng.normal(size=({n}, 5, 4)).astype('float32')"),
    "images": ("image", "(6, 6, 2)", "rng.normal(size=({n}, 6, 6, 2)).astype('float32')"),
    "few": ("ids", "(6,)", "rng.integers(0, 4, ({n}, 6)).astype('int32')"),
    "many": ("ids", "(6,)", "rng.integers(0, 50, ({n}, 6)).astype('int32')"),
}

HELPERS = {
    name: textwrap.dedent(text).strip()
    for name, text in {
        "Twice": """
            class Twice(layers.Layer):
                def __init__(self, layer):
                    super().__init__()
                    self.layer = layer
                def call(self, x):
                    return self.layer(self.layer(x))
            """,
        "Residual": """
            class Residual(layers.Layer):
                def build(self, shape):
                    self.dense = layers.Dense(shape[-1], "tanh")
                    self.gate = self.add_weight(shape=(), initializer="ones")
                def call(self, x):
                    return x + self.gate * self.dense(x)
            """,
        "AddMean": """
            class AddMean(layers.Layer):
                def call(self, x):
                    own = keras.ops.cast(x, keras.config.floatx())
                    self.add_loss(0.1 * keras.ops.mean(keras.ops.square(own)))
                    return x
            """,
        "AddSum": """
            class AddSum(layers.Layer):
                def call(self, x):
                    own = keras.ops.cast(x, keras.config.floatx())
                    self.add_loss(0.01 * keras.ops.sum(keras.ops.square(own)))
                    return x
            """,
        "AddWeights": """
            class AddWeights(layers.Layer):
                def build(self, shape):
                    self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
                def call(self, x):
                    own = keras.ops.cast(self.scale, keras.config.floatx())
                    self.add_loss(0.1 * keras.ops.sum(keras.ops.square(own)))
                    return x * self.scale
            """,
        "Counter": """
            class Counter(layers.Layer):
                def build(self, shape):
                    self.steps = self.add_weight(
                        shape=(), initializer="zeros", dtype="int32", trainable=False
                    )
                def call(self, x, training=None):
                    if training:
                        self.steps.assign_add(1)
                    return x
            """,
        "Moving": """
            class Moving(layers.Layer):
                def build(self, shape):
                    self.mean = self.add_weight(
                        shape=(shape[-1],), initializer="zeros", trainable=False
                    )
                def call(self, x, training=None):
                    if training:
                        now = keras.ops.cast(keras.ops.mean(x, axis=0), self.mean.dtype)
                        self.mean.assign(0.9 * self.mean + 0.1 * now)
                    return x
            """,
        "ClipsBack": """
            class ClipsBack(layers.Layer):
                def call(self, x):
                    @tf.custom_gradient
                    def same(x):
                        return tf.identity(x), lambda grad: tf.clip_by_value(grad, -0.02, 0.02)
                    return same(x)
            """,
        "AddFaded": """
            class AddFaded(layers.Layer):
                def call(self, x):
                    own = keras.ops.cast(x, keras.config.floatx())
                    place = keras.ops.cast(keras.ops.arange(keras.ops.shape(x)[0]), own.dtype)
                    self.add_loss(0.01 * keras.ops.sum(own * own / (1 + place)[:, None]))
                    return x
            """,
        "Seen": """
            class Seen(layers.Layer):
                def build(self, shape):
                    self.count, self.total = (
                        self.add_weight(shape=(), initializer="zeros", trainable=False, name=name)
                        for name in ("count", "total")
                    )
                def call(self, x, training=None):
                    if training:
                        own = keras.ops.cast(x, self.total.dtype)
                        size = keras.ops.cast(keras.ops.shape(x)[0], self.count.dtype)
                        self.count.assign_add(size)
                        self.total.assign_add(keras.ops.sum(keras.ops.abs(own)))
                    return x + 0.1 * keras.ops.cast(self.total / (self.count + 1), x.dtype)
            """,
        "Kept": """
            class Kept(layers.Layer):
                def build(self, shape):
                    self.count = tf.Variable(1.0, trainable=False)
                    self.total = tf.Variable(tf.zeros([shape[-1]]), trainable=False)
                def call(self, x, training=None):
                    if training:
                        self.count.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
                        self.total.assign_add(tf.reduce_sum(tf.cast(x, tf.float32), 0))
                    return x + 0.1 * tf.cast(self.total / self.count, x.dtype)
            """,
        "Experts": """
            class Experts(layers.Layer):
                def build(self, shape):
                    self.gate = layers.Dense(2, "softmax")
                    self.parts = [layers.Dense(5, "tanh") for _ in range(2)]
                def call(self, x):
                    gates = self.gate(x)
                    return sum(
                        gates[:, i : i + 1] * part(x) for i, part in enumerate(self.parts)
                    )
            """,
        "TokenAndPosition": """
            class TokenAndPosition(layers.Layer):
                def __init__(self, vocabulary, length, width):
                    super().__init__()
                    self.token = layers.Embedding(vocabulary, width)
                    self.position = layers.Embedding(length, width)
                def call(self, x):
                    return self.token(x) + self.position(keras.ops.arange(keras.ops.shape(x)[-1]))
            """,
        "Tied": """
            class Tied(layers.Layer):
                def __init__(self, vocabulary, width):
                    super().__init__()
                    self.table = layers.Embedding(vocabulary, width)
                    self.dense = layers.Dense(width)
                def call(self, x):
                    hidden = self.dense(self.table(x))
                    table = keras.ops.cast(self.table.embeddings, hidden.dtype)
                    return keras.ops.matmul(hidden, keras.ops.transpose(table))
            """,
        "SelfAttention": """
            class SelfAttention(layers.Layer):
                def __init__(self, attention, **options):
                    super().__init__()
                    self.attention, self.options = attention, options
                def call(self, x):
                    if isinstance(self.attention, layers.Attention):
                        return self.attention([x, x])
                    return self.attention(x, x, **self.options)
            """,
        "Largest": """
            class Largest(keras.metrics.Metric):
                def __init__(self):
                    super().__init__(name="largest")
                    self.most = self.add_weight(shape=(), initializer="zeros")
                def update_state(self, y_true, y_pred, sample_weight=None):
                    top = keras.ops.cast(keras.ops.max(keras.ops.abs(y_pred)), self.dtype)
                    self.most.assign(keras.ops.maximum(self.most, top))
                def result(self):
                    return self.most
            """,
        "PerExample": """
            class PerExample(keras.metrics.Metric):
                def __init__(self):
                    super().__init__(name="per_example")
                    self.batches, self.examples, self.total = (
                        self.add_weight(shape=(), initializer="zeros", name=name)
                        for name in ("batches", "examples", "total")
                    )
                def update_state(self, y_true, y_pred, sample_weight=None):
                    size = keras.ops.shape(y_pred)[0]
                    self.batches.assign_add(1)
                    self.examples.assign_add(keras.ops.cast(size, self.dtype))
                    self.total.assign_add(keras.ops.sum(keras.ops.cast(y_pred, self.dtype)))
                def result(self):
                    return (self.total + self.batches) / (self.examples + 1)
            """,
        "batch_error": """
            def batch_error(t, p):
                return keras.ops.mean(keras.ops.abs(t - p))
            """,
        "Batches": """
            class Batches(keras.utils.PyDataset):
                def __len__(self):
                    return -(-N // B)
                def __getitem__(self, i):
                    return rows(slice(i * B, i * B + B))
            """,
        "Logs": """
            class Logs(keras.callbacks.Callback):
                def on_train_batch_end(self, batch, logs=None):
                    seen.setdefault("batches", []).append({k: float(v) for k, v in logs.items()})
            """,
    }.items()
}
