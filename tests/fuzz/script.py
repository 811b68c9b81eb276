"""The script of a program. It is what is run, so that what is printed is what has failed."""

from __future__ import annotations

import re
import textwrap

from tests.fuzz import tasks, vocabulary
from tests.fuzz.spec import Head, Spec

HEADER = """\
import keras
import numpy as np
import tensorflow as tf
from keras import layers
"""
NAMES = ("one", "two")

_APPLY = """\
grads = tape.gradient(loss, self.trainable_variables)
self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
"""
_LOSS = """\
with tf.GradientTape() as tape:
    p = self(x, training=True)
    loss = {loss}
"""
_TWO = """\
grads = tape.gradient(loss, self.trainable_variables)
pairs = list(zip(grads, self.trainable_variables))
self.{first}.apply_gradients(pairs[:1])
self.{second}.apply_gradients(pairs[1:])
"""
_COMPUTED = "self.compute_loss(x=x, y=y, y_pred=p, sample_weight=w)"
_SQUARES = "tf.square(tf.cast(y, p.dtype) - p)"

STEPS = {
    "compute_loss": _LOSS.format(loss=_COMPUTED) + _APPLY,
    "mean": _LOSS.format(loss=f"tf.reduce_mean({_SQUARES})") + _APPLY,
    "sum": _LOSS.format(loss=f"0.01 * tf.reduce_sum({_SQUARES})") + _APPLY,
    "decayed": _LOSS.format(
        loss=f"tf.sqrt(tf.reduce_mean({_SQUARES}) + 0.1)"
        " + 0.05 * tf.add_n([tf.nn.l2_loss(v) for v in self.trainable_variables])"
    )
    + _APPLY,
    "scaled": _LOSS.format(
        loss=f"0.01 * tf.reduce_sum({_SQUARES}) + tf.reduce_mean(tf.abs(p))\n"
        "    scaled = self.optimizer.scale_loss(loss)"
    )
    + _APPLY.replace("(loss", "(scaled"),
    "clip": _LOSS.format(loss=_COMPUTED)
    + "grads = tape.gradient(loss, self.trainable_variables)\n"
    + "grads, _ = tf.clip_by_global_norm(grads, 0.05)\n"
    + "self.optimizer.apply_gradients(zip(grads, self.trainable_variables))\n",
    "two": _LOSS.format(loss=_COMPUTED) + _TWO.format(first="optimizer", second="second"),
    "list": _LOSS.format(loss=_COMPUTED) + _TWO.format(first="several[0]", second="several[1]"),
    "penalty": "with tf.GradientTape() as inner:\n"
    "    inner.watch(x)\n"
    "    total = tf.add_n([tf.reduce_sum(v) for v in tf.nest.flatten(self(x, training=True))])\n"
    "slope = inner.gradient(total, x)\n"
    "with tf.GradientTape() as tape:\n"
    "    with tf.GradientTape() as inner:\n"
    "        inner.watch(x)\n"
    "        p = self(x, training=True)\n"
    "        total = tf.add_n([tf.reduce_sum(v) for v in tf.nest.flatten(p)])\n"
    "    slope = inner.gradient(total, x)\n"
    f"    loss = {_COMPUTED} + 0.1 * tf.reduce_mean(tf.square(slope))\n" + _APPLY,
    "adversarial": "with tf.GradientTape() as inner:\n"
    "    inner.watch(x)\n"
    f"    p = self(x, training=True)\n    loss = {_COMPUTED}\n"
    "slopes = inner.gradient(loss, x)\n"
    "x = tf.nest.map_structure(lambda v, slope: v + 2.0 * slope, x, slopes)\n"
    + _LOSS.format(loss=_COMPUTED)
    + _APPLY,
    "reversed": "x = tf.nest.map_structure(lambda v: 0.7 * v + 0.3 * v[::-1], x)\n"
    + _LOSS.format(loss=_COMPUTED)
    + _APPLY,
    "counted": _LOSS.format(loss=_COMPUTED)
    + _APPLY
    + "factor = tf.where(self.optimizer.iterations % 2 == 0, 0.9, 1.0)\n"
    + "for weight in self.trainable_variables:\n"
    + "    weight.assign(weight * tf.cast(factor, weight.dtype))\n",
    "graph": f"p = self(x, training=True)\nloss = {_COMPUTED}\n"
    + "grads = tf.gradients(loss, [v.value for v in self.trainable_variables])\n"
    + "self.optimizer.apply_gradients(zip(grads, self.trainable_variables))\n",
    "own": _LOSS.format(loss=f"tf.reduce_mean({_SQUARES})")
    + "grads = tape.gradient(loss, self.trainable_variables)\n"
    + "for weight, grad in zip(self.trainable_variables, grads):\n"
    + "    weight.assign_sub(0.05 * grad)\n",
    "twice": "for _ in range(2):\n"
    + textwrap.indent(_LOSS.format(loss=_COMPUTED) + _APPLY, "    "),
}


def source(spec: Spec) -> str:
    """The whole script."""
    return HEADER + made(spec) + used(spec)


def made(spec: Spec) -> str:
    """The part that makes data and model: what runs in the strategy's scope in any case."""
    body = "\n".join([_data(spec), _model(spec), _compile(spec, _optimizer(spec)), ""])
    seed = "\nseen = {}\nkeras.utils.set_random_seed(1)\n"
    if spec.policy == "float64":
        seed += "keras.config.set_floatx('float64')\n"
    if spec.policy != "float32":
        seed += f"keras.config.set_dtype_policy('{spec.policy}')\n"
    words = set(re.findall(r"\w+", body + used(spec)))
    helpers = [text for name, text in vocabulary.HELPERS.items() if name in words]
    return seed + "".join(f"\n{text}\n" for text in helpers) + "\n" + body


# Data


def _data(spec: Spec) -> str:
    _, shape, rows = vocabulary.DATA[spec.data]
    n = spec.examples
    lines = [f"N, B = {n}, {spec.batch}", "rng = np.random.default_rng(0)"]
    lines += [f"a = {rows.format(n='N')}"]
    length = shape.strip("()").split(",")[0]
    labels = [tasks.TASKS[h.task].labels.format(n="N", length=length) for h in spec.heads]
    lines += ["b = rng.normal(size=(N, 3)).astype('float32')"] if spec.second else []
    lines += [_inputs(spec)]
    if len(labels) == 1:
        lines += [f"y = {labels[0]}"]
    else:
        pairs = zip(NAMES, labels, strict=False)
        lines += [f"y = {{{', '.join(f'{name!r}: {text}' for name, text in pairs)}}}"]
    if spec.weighting in ("sample", "zeros"):
        low = 0.2 if spec.weighting == "sample" else -1.0
        one = f"np.linspace({low}, 2.0, N).clip(0).astype('float32')"
        many = {name: f"{one}[::{1 - 2 * i}]" for i, name in enumerate(NAMES)}
        each = ", ".join(f"{name!r}: {text}" for name, text in many.items())
        lines += [f"w = {one}" if len(labels) == 1 else f"w = {{{each}}}"]
    return "\n".join([*lines, *_source_lines(spec)])


def _inputs(spec: Spec) -> str:
    if spec.source == "ragged":
        return "x = tf.ragged.boolean_mask(a, np.arange(6) < rng.integers(1, 7, (N, 1)))"
    if spec.source == "sparse":
        return "x = tf.sparse.from_dense(a * (rng.random(a.shape) < 0.3))"
    if spec.source == "tensors":
        tensors = {"": "tf.constant(a)", "dict": "{'a': tf.constant(a), 'b': tf.constant(b)}"}
        return f"x = {tensors.get(spec.second, '[tf.constant(a), tf.constant(b)]')}"
    arrays = {"": "a", "dict": "{'a': a, 'b': b}", "list": "[a, b]"}
    return f"x = {arrays[spec.second]}"


def _tuple(spec: Spec) -> str:
    return "(x, y, w)" if spec.weighting in ("sample", "zeros") else "(x, y)"


def _source_lines(spec: Spec) -> list[str]:
    rows = f"tf.data.Dataset.from_tensor_slices({_tuple(spec)})"
    nested = f"tf.nest.map_structure(lambda v: v[part], {_tuple(spec)})"
    function = ["def rows(part):", f"    return {nested}"]
    datasets = {
        "dataset": f"{rows}.batch(B)",
        "ragged": f"{rows}.batch(B)",
        "sparse": f"{rows}.batch(B)",
        "dataset_unknown": f"{rows}.filter(lambda *_: True).batch(B)",
        "dataset_repeated": f"{rows}.batch(B).repeat()",
        "dataset_shuffled": f"{rows}.shuffle(N, seed=7).batch(B)",
        "dataset_dropped": f"{rows}.batch(B, drop_remainder=True)",
        "dataset_varied": f"{rows}.take(B).batch(B).concatenate({rows}.skip(B).batch(B // 2 + 1))",
    }
    if spec.source in datasets:
        return [f"data = {datasets[spec.source]}"]
    if spec.source == "lengths":
        return [
            "lengths = np.sort(rng.integers(1, a.shape[1] + 1, N))",
            f"data = tf.data.Dataset.from_tensor_slices((lengths, *{_tuple(spec)}))",
            "data = data.map(lambda n, x, *rest: (x[:n], *rest)).padded_batch(B)",
        ]
    if spec.source == "generator":
        return [
            *function,
            "def generate():",
            "    while True:",
            "        for i in range(0, N, B):",
            "            yield rows(slice(i, i + B))",
        ]
    if spec.source.startswith("sequence"):
        return function
    return []


def given(spec: Spec, call: str) -> list[str]:
    """The arguments that give `fit`, `evaluate` or `predict` their data."""
    steps = "steps_per_epoch" if call == "fit" else "steps"
    if spec.source in ("arrays", "tensors"):
        weighed = ["sample_weight=w"] if spec.weighting in ("sample", "zeros") else []
        labels = [] if call == "predict" else ["y", *weighed]
        return ["x", *labels, "batch_size=B"]
    if spec.source == "generator":
        return ["generate()", f"{steps}={spec.steps}"]
    if spec.source == "sequence":
        return ["Batches()"]
    if spec.source == "sequence_workers":
        return ["Batches(workers=2, max_queue_size=4)"]
    if spec.source == "dataset_repeated":
        return ["data", f"{steps}={spec.steps}"]
    return ["data"]


# The model


def _layers(spec: Spec) -> list[str]:
    """Expressions of the hidden layers, with those that bring each part what it takes."""
    kind = vocabulary.DATA[spec.data][0]
    found: list[str] = []
    for name in spec.parts:
        part = vocabulary.PARTS[name]
        if part.takes != kind:
            flat = vocabulary.FLATTENING[kind]
            found += flat[:1] if kind == "ids" and part.takes == "series" else flat
        found += part.layers
        kind = part.gives
    if spec.heads[0].task in tasks.OF_SERIES:
        return found
    return [*found, *vocabulary.FLATTENING[kind]]


def _last(spec: Spec, head: Head, name: str) -> str:
    """An output's layer: in half precision Keras's guides have it compute in float32."""
    dtype = ", dtype='float32'" if spec.policy.startswith("mixed") else ""
    return f"{tasks.TASKS[head.task].layer}{dtype}, name='{name}')"


def _model(spec: Spec) -> str:
    step = _steps(spec)
    heads = [_last(spec, head, name) for head, name in zip(spec.heads, NAMES, strict=False)]
    if spec.style == "subclass":
        return _subclass(spec, heads, step)
    if spec.style in ("sequential", "lazy"):
        kind = "keras.Sequential"
        first = [f"keras.Input({_input(spec)})"] if spec.style == "sequential" else []
        rows = ["[", *(f"    {row}," for row in [*first, *_layers(spec), *heads]), "]"]
        return _define(kind, step) + f"model = {'Net' if step else kind}(" + "\n".join(rows) + ")"
    lines = [f"h = a_in = keras.Input({_input(spec)}, name='a')"]
    lines += [f"h = {layer}(h)" for layer in _layers(spec)]
    inputs = "a_in"
    if spec.second:
        lines += ["b_in = keras.Input((3,), name='b')"]
        lines += ["h = layers.Concatenate()([h, layers.Dense(4)(b_in)])"]
        inputs = "{'a': a_in, 'b': b_in}" if spec.second == "dict" else "[a_in, b_in]"
    outputs = [f"{head}(h)" for head in heads]
    text = outputs[0]
    if len(outputs) > 1:
        text = "{" + ", ".join(f"'{n}': {o}" for n, o in zip(NAMES, outputs, strict=False)) + "}"
    lines += [f"model = {'Net' if step else 'keras.Model'}({inputs}, {text})"]
    return _define("keras.Model", step) + "\n".join(lines)


def _define(base: str, step: str) -> str:
    return f"class Net({base}):\n{textwrap.indent(step, '    ')}\n" if step else ""


def _input(spec: Spec) -> str:
    kind, shape, _ = vocabulary.DATA[spec.data]
    if spec.source in ("lengths", "ragged"):
        shape = "(None,)" if kind == "ids" else "(None, 4)"
    more = ", dtype='int32'" if kind == "ids" else ""
    more += ", ragged=True" if spec.source == "ragged" else ""
    return shape + more + (", sparse=True" if spec.source == "sparse" else "")


def _subclass(spec: Spec, heads: list[str], step: str) -> str:
    hidden = "".join(f"            {layer},\n" for layer in _layers(spec))
    several = len(heads) > 1
    lines = [
        "class Net(keras.Model):",
        "    def __init__(self):",
        "        super().__init__()",
        f"        self.hidden = [\n{hidden}        ]",
        *(["        self.beside = layers.Dense(4)"] if spec.second else []),
        f"        self.heads = [{', '.join(heads)}]",
        "    def call(self, x, training=None):",
    ]
    if spec.second:
        a, b = ("x['a']", "x['b']") if spec.second == "dict" else ("x[0]", "x[1]")
        lines += [f"        h, other = {a}, {b}"]
    else:
        lines += ["        h = x"]
    lines += [
        "        for layer in self.hidden:",
        "            h = layer(h)",
    ]
    if spec.second:
        lines += ["        h = keras.ops.concatenate([h, self.beside(other)], axis=-1)"]
    each = ", ".join(f"'{name}': self.heads[{i}](h)" for i, name in enumerate(NAMES[: len(heads)]))
    lines += [f"        return {{{each}}}" if several else "        return self.heads[0](h)"]
    return "\n".join(lines) + "\n" + textwrap.indent(step, "    ") + "\nmodel = Net()"


def _steps(spec: Spec) -> str:
    """The methods of an own training step."""
    if not spec.step:
        return ""
    if spec.step == "override":
        return textwrap.dedent("""\
            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
                loss = super().compute_loss(x, y, y_pred, sample_weight, training=training)
                first = tf.nest.flatten(y_pred)[0]
                return loss + 0.1 * keras.ops.mean(keras.ops.square(first))
            """)
    body = "x, y, w = keras.utils.unpack_x_y_sample_weight(data)\n" + STEPS[spec.step]
    if len(spec.heads) == 1:
        body += (
            "for metric in self.metrics:\n"
            "    if metric.name == 'loss':\n"
            "        metric.update_state(loss)\n"
            "    else:\n"
            "        metric.update_state(y, p)\n"
            "return {m.name: m.result() for m in self.metrics}"
        )
    else:
        body += "return {'loss': loss, **self.compute_metrics(x, y, p, w)}"
    return "def train_step(self, data):\n" + textwrap.indent(body, "    ")


# Compilation


def _loss(head: Head) -> str:
    text = tasks.LOSSES[head.loss]
    reduction = f"reduction='{head.reduction}'" if head.reduction else ""
    if reduction and "{r}" not in text and "{, r}" not in text:
        return text
    return text.replace("{r}", reduction).replace("{, r}", f", {reduction}" if reduction else "")


def _optimizer(spec: Spec) -> str:
    if spec.optimizer == "MultiOptimizer":
        return f"keras.optimizers.MultiOptimizer({tasks.BY_NAME})"
    values = {name: repr(value) for name, value in tasks.OPTIMIZERS[spec.optimizer].items()}
    if spec.optimizer == "SGD" and any(head.reduction == "sum" for head in spec.heads):
        values["learning_rate"] = "0.005"  # With ten times as much some programs diverge.
    for key in spec.options:
        if key in tasks.OPTIONS:
            name, value = tasks.OPTIONS[key]
            values[name] = str(value) if name == "learning_rate" else repr(value)
    arguments = ", ".join(f"{name}={value}" for name, value in values.items())
    made = f"keras.optimizers.{spec.optimizer}({arguments})"
    if "loss_scale_optimizer" in spec.options:
        return f"keras.optimizers.LossScaleOptimizer({made}, initial_scale=1024.0)"
    return made


def _each(spec: Spec, values: list[str]) -> str:
    """A value for the only output, or a dict for several."""
    if len(values) == 1:
        return values[0]
    return "{" + ", ".join(f"'{n}': {v}" for n, v in zip(NAMES, values, strict=False)) + "}"


def _compile(spec: Spec, optimizer: str) -> str:
    if {"loop", "strategy_loop"} & {*spec.calls}:
        return f"optimizer = {optimizer}"
    heads = spec.heads
    arguments = [optimizer, _each(spec, [_loss(head) for head in heads])]
    if any(head.loss_weight for head in heads):
        arguments += [f"loss_weights={_each(spec, [str(h.loss_weight or 1.0) for h in heads])}"]
    for name, weighted in (("metrics", False), ("weighted_metrics", True)):
        lists = [list(h.metrics) if h.weighted_metrics is weighted else [] for h in heads]
        if any(lists):
            arguments += [f"{name}={_each(spec, ['[' + ', '.join(e) + ']' for e in lists])}"]
    lines = ["model.compile(", *(f"    {each}," for each in [*arguments, *spec.compiled]), ")"]
    if "ScheduleFreeAdamW(" in optimizer:
        # Plain Keras loses what it assigns when it is built within a step (docs/promise.md).
        lines += ["model.optimizer.build(model.trainable_variables)"]
    if spec.step in ("two", "list"):
        second = "keras.optimizers.Adam(0.02, epsilon=1e-3)"
        more = {
            "two": f"model.second = {second}",
            "list": f"model.several = [model.optimizer, {second}]",
        }
        lines += [
            more[spec.step],
            "optimizers = " + ("[model.second]" if spec.step == "two" else "model.several[1:]"),
        ]
    return "\n".join(lines)


# What is called


def used(spec: Spec) -> str:
    """The part that trains, evaluates and predicts."""
    writers = {
        "fit": _fit,
        "on_batch": _on_batch,
        "again": _again,
        "frozen": _frozen,
        "cleared": _cleared,
        "looked": _looked,
        "loop": _loop,
        "strategy_loop": _strategy_loop,
    }
    blocks = [writers.get(call, lambda s, c=call: _other(s, c))(spec) for call in spec.calls]
    return "\n" + "\n".join(blocks) + "\n"


def _fit(spec: Spec, name: str = "fit", epochs: int = 0) -> str:
    arguments = given(spec, "fit")
    if spec.source in ("arrays", "tensors") or spec.source.startswith("sequence"):
        arguments += [] if "shuffle" in spec.fitted else ["shuffle=False"]
    arguments += [f"epochs={epochs or spec.epochs}", "verbose=0"]
    if "validation" in spec.fitted:
        arguments += _validation(spec)
    if "validation_split" in spec.fitted:
        arguments += ["validation_split=0.3"]
    if "steps" in spec.fitted and not any("steps_per_epoch" in a for a in arguments):
        arguments += [f"steps_per_epoch={max(1, spec.steps - 1)}"]
    if spec.weighting == "class":
        arguments += ["class_weight={0: 1.0, 1: 3.0, 2: 0.5}"]
    if spec.callbacks:
        arguments += [f"callbacks=[{', '.join(tasks.CALLBACKS[c] for c in spec.callbacks)}]"]
    return f"seen['{name}'] = model.fit({', '.join(arguments)}).history"


def _validation(spec: Spec) -> list[str]:
    if spec.source in ("arrays", "tensors"):
        return [f"validation_data={_tuple(spec)}"]
    first, *steps = given(spec, "evaluate")
    return [f"validation_data={first}", *(f"validation_{each}" for each in steps)]


def _batches(spec: Spec) -> str:
    """A loop's head that gives batches as tuples."""
    if spec.source in ("arrays", "tensors"):
        nested = f"tf.nest.map_structure(lambda v: v[i : i + B], {_tuple(spec)})"
        return f"for batch in ({nested} for i in range(0, N, B)):"
    if spec.source in ("generator", "sequence", "sequence_workers"):
        return "for batch in (rows(slice(i, i + B)) for i in range(0, N, B)):"
    return f"for batch in data.take({spec.steps}):"


def _on_batch(spec: Spec) -> str:
    more = ", class_weight={0: 1.0, 1: 3.0, 2: 0.5}" if spec.weighting == "class" else ""
    return "\n".join(
        [
            "seen['on_batch'] = []",
            _batches(spec),
            f"    logs = model.train_on_batch(*batch, return_dict=True{more})",
            "    seen['on_batch'].append(logs)",
        ]
    )


def _again(spec: Spec) -> str:
    return (
        _compile(spec, "keras.optimizers.Adam(0.01, epsilon=1e-3)") + "\n" + _fit(spec, "again", 1)
    )


def _frozen(spec: Spec) -> str:
    lines = ["for layer in model.layers[:-1]:", "    layer.trainable = False"]
    return "\n".join([*lines, _compile(spec, _optimizer(spec)), _fit(spec, "frozen", 1)])


def _cleared(spec: Spec) -> str:
    compiled = _compile(spec, _optimizer(spec))
    return "\n".join(["keras.backend.clear_session()", compiled, _fit(spec, "cleared", 1)])


def _looked(spec: Spec) -> str:
    """Reads a batch in the program, which is a pass over the data set too."""
    return "next(iter(data))\n" + _fit(spec, "looked", 1)


def _other(spec: Spec, call: str) -> str:
    if call in ("evaluate", "predict"):
        arguments = [*given(spec, call), "verbose=0"]
        arguments += ["return_dict=True"] if call == "evaluate" else []
        return f"seen['{call}'] = model.{call}({', '.join(arguments)})"
    taken = "model.test_on_batch(*batch, return_dict=True)"
    if call == "predict_on_batch":
        taken = "model.predict_on_batch(batch[0])"
    return "\n".join([_batches(spec), f"    seen['{call}'] = {taken}", "    break"])


def _loop(spec: Spec) -> str:
    return "\n".join(
        [
            f"loss_fn = keras.losses.get({_loss(spec.heads[0])})",
            "@tf.function",
            "def step(x, y):",
            "    with tf.GradientTape() as tape:",
            "        p = model(x, training=True)",
            "        loss = tf.reduce_mean(loss_fn(y, p)) + sum(model.losses)",
            "    grads = tape.gradient(loss, model.trainable_variables)",
            "    optimizer.apply(grads, model.trainable_variables)",
            "    return loss",
            f"for _ in range({spec.epochs}):",
            f"    {_batches(spec)}",
            "        seen.setdefault('loop', []).append(step(*batch))",
        ]
    )


def _strategy_loop(spec: Spec) -> str:
    loss = _loss(Head(task=spec.heads[0].task, loss=spec.heads[0].loss, reduction="none"))
    data = (
        "data"
        if spec.source == "dataset"
        else (f"tf.data.Dataset.from_tensor_slices({_tuple(spec)}).batch(B)")
    )
    return "\n".join(
        [
            "strategy = tf.distribute.get_strategy()",
            f"loss_fn = {loss}",
            "def step(x, y):",
            "    with tf.GradientTape() as tape:",
            "        p = model(x, training=True)",
            "        loss = tf.nn.compute_average_loss(loss_fn(y, p), global_batch_size=B)",
            "    grads = tape.gradient(loss, model.trainable_variables)",
            "    optimizer.apply_gradients(zip(grads, model.trainable_variables))",
            "    return loss",
            "@tf.function",
            "def everywhere(x, y):",
            "    return strategy.reduce('SUM', strategy.run(step, args=(x, y)), axis=None)",
            f"data = strategy.experimental_distribute_dataset({data})",
            f"for _ in range({spec.epochs}):",
            "    for batch in data:",
            "        seen.setdefault('loop', []).append(everywhere(*batch))",
        ]
    )
