"""The canary: every seam of Keras and TensorFlow that tfdist overrides, by name and signature.

When a new release moves one, the test that fails names it. Look at what changed there before the
supported range in setup.cfg is widened.
"""

from __future__ import annotations

import inspect

import pytest

from tfdist.horovod import program as horovod_program
from tfdist.keras import scope
from tfdist.keras.served import hooks as served_hooks
from tfdist.keras.served.serving import Serving
from tfdist.pipelines import hooks as pipeline_hooks

SIGNATURES = {
    "TensorFlowTrainer.__init__": "(self)",
    "TensorFlowTrainer._make_function": "(self, step_function)",
    "TensorFlowTrainer._maybe_symbolic_build": "(self, iterator=None, data_batch=None)",
    "TensorFlowTrainer.make_predict_function": "(self, force=False)",
    "TensorFlowTrainer.predict_on_batch": "(self, x)",
    "TensorFlowTrainer.test_on_batch": ("(self, x, y=None, sample_weight=None, return_dict=False)"),
    "TensorFlowTrainer.train_on_batch": (
        "(self, x, y=None, sample_weight=None, class_weight=None, return_dict=False)"
    ),
    "TFOptimizer._all_reduce_sum_gradients": "(self, grads_and_vars)",
    "BaseOptimizer.apply": "(self, grads, trainable_variables=None)",
    "LossScaleOptimizer.scale_loss": "(self, loss)",
    "LossScaleOptimizer._stateful_handle_non_finite_grads": "(self)",
    "Function.__call__": "(self, *args, **kwds)",
    "LossScaleOptimizer.apply": "(self, grads, trainable_variables=None)",
    "LossScaleOptimizer._tf_apply": "(self, grads, trainable_variables=None)",
    "TFEpochIterator.__init__": "(self, distribute_strategy=None, *args, **kwargs)",
    "Trainer.get_metrics_result": "(self)",
    "SyncOnReadVariable._get_cross_replica": "(self)",
    "Variable._initialize": "(self, value)",
    "Variable._direct_assign": "(self, value)",
    "SeedGenerator.next": "(self, ordered=True)",
    "Mean.update_state": "(self, values, sample_weight=None)",
    "keras.src.losses.loss.scale_loss_for_distribution": "(value)",
    "keras.src.losses.loss.unscale_loss_for_distribution": "(value)",
    "keras.src.losses.loss.reduce_weighted_values": (
        "(values, sample_weight=None, mask=None, reduction='sum_over_batch_size', dtype=None)"
    ),
    "keras.src.backend.tensorflow.nn._compute_moments_sync": "(x, axes, keepdims)",
    "variables.Variable.assign_add": "(self, value)",
    "variables.Variable.assign_sub": "(self, value)",
    "Embedding.call": "(self, inputs)",
    "Adam.update_step": "(self, gradient, variable, learning_rate)",
    "BaseOptimizer._get_current_learning_rate": "(self)",
    "TensorFlowTrainer.make_train_function": "(self, force=False)",
    "TensorFlowTrainer.make_test_function": "(self, force=False)",
    "TensorFlowTrainer._get_metrics_result_or_logs": "(self, logs)",
    "TensorFlowTrainer.fit": (
        "(self, x=None, y=None, batch_size=None, epochs=1, verbose='auto', callbacks=None, "
        "validation_split=0.0, validation_data=None, shuffle=True, class_weight=None, "
        "sample_weight=None, initial_epoch=0, steps_per_epoch=None, validation_steps=None, "
        "validation_batch_size=None, validation_freq=1)"
    ),
    "EpochIterator._enumerate_iterator": "(self)",
    "Trainer.compile": (
        "(self, optimizer='rmsprop', loss=None, loss_weights=None, metrics=None, "
        "weighted_metrics=None, run_eagerly=False, steps_per_execution=1, jit_compile='auto', "
        "auto_scale_loss=True)"
    ),
    "CallbackList.on_epoch_begin": "(self, epoch, logs=None)",
    "CallbackList.on_epoch_end": "(self, epoch, logs=None)",
    "CallbackList.on_train_batch_end": "(self, batch, logs=None)",
    "CallbackList.on_train_end": "(self, logs=None)",
    "BaseOptimizer.build": "(self, variables)",
    "BaseOptimizer._clip_gradients": "(self, grads)",
    "keras.src.saving.saving_lib._raise_loading_failure": "(error_msgs, warn_only=False)",
}


def seams():
    served = served_hooks.hooks(Serving(_Servers(), lambda: None))
    piped = pipeline_hooks.hooks(lambda model: None, lambda function: None, lambda: None)
    found = [*scope.all_hooks(), *served, *horovod_program.hooks(), *piped]
    return {hook.path: hook for hook in found}


class _Servers:
    """Servers that nobody asks anything: the hooks are listed, not installed."""

    shelves = None


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_a_seam_is_where_it_was(name):
    found = [hook for path, hook in seams().items() if path.endswith(name)]
    assert found, f"tfdist hooks {name} no longer: take it out of this test"
    original = getattr(found[0].owner, found[0].name)
    assert str(inspect.signature(original)) == SIGNATURES[name], f"Keras moved {name}"


def test_every_seam_exists():
    for path, hook in seams().items():
        assert hasattr(hook.owner, hook.name), f"Keras has no {path} any more"


def test_hooks_are_undone_when_the_scope_closes():
    hooks = scope.all_hooks()
    before = [vars(h.owner).get(h.name) for h in hooks]
    scope.enter()
    scope.enter()
    inside = [vars(h.owner).get(h.name) for h in hooks]
    scope.leave()
    assert [vars(h.owner).get(h.name) for h in hooks] == inside
    scope.leave()
    assert [vars(h.owner).get(h.name) for h in hooks] == before
    assert all(a is not b for a, b in zip(before, inside, strict=True))


def test_private_symbols_of_tensorflow():
    from tfdist import _tensorflow as private

    for extended in (private.LocalExtended, private.CollectiveExtended):
        base = next(c for c in extended.__mro__ if c.__module__.startswith("tensorflow"))
        for name in ("_use_merge_call", "_create_variable", "_replica_ctx_all_reduce"):
            assert hasattr(base, name), f"TensorFlow has no {base.__name__}.{name} any more"
    signature = inspect.signature(private.CollectiveAllReduceExtended._initialize_local_devices)
    assert str(signature) == "(self, cluster_resolver, worker_device)"
    assert private.has_started() in (True, False)


def test_private_symbols_of_sessions():
    import tensorflow as tf
    from tensorflow.python.training import training_util

    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    assert hasattr(strategy, "_scale_loss_for_estimator_enabled")
    assert str(inspect.signature(strategy.extended._update_config_proto)) == "(config_proto)"
    assert training_util.GLOBAL_STEP_READ_KEY == "global_step_read_op_cache"
    hook = tf.compat.v1.train.CheckpointSaverHook("nowhere", save_steps=1)
    assert hook._listeners == []


def test_what_placement_and_pipelines_read_of_keras():
    """Graphs that are taken apart, and methods that are replaced on single objects."""
    import keras
    from keras.src.models.functional import operation_fn

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, kernel_regularizer="l2")])
    graph = model._functional
    (node,) = [n for nodes in graph._nodes_by_depth.values() for n in nodes if not n.is_input]
    assert node.operation is model.layers[0]
    assert [id(t) for t in node.input_tensors] == [id(t) for t in graph._inputs]
    assert [id(t) for t in node.outputs] == [id(t) for t in graph._outputs]
    assert hasattr(node.arguments, "fill_in")
    assert len(model.layers[0]._get_regularization_losses()) == 1
    assert model.layers[0]._losses == []
    for name in ("_standardize_inputs", "_outputs_struct", "_inputs_struct"):
        assert hasattr(graph, name), name
    assert str(inspect.signature(operation_fn)) == "(operation, **call_context_args)"
    model.compile(keras.optimizers.Adam(), "mse")
    for name in ("_compile_loss", "_loss_tracker", "train_function", "jit_compile"):
        assert hasattr(model, name), name
    optimizer = {
        "update_step": "(gradient, variable, learning_rate)",
        "add_variable_from_reference": "(reference_variable, name=None, initializer='zeros')",
        "_clip_gradients": "(grads)",
        "_apply_weight_decay": "(variables)",
        "_use_weight_decay": "(variable)",
    }
    for name, expected in optimizer.items():
        assert str(inspect.signature(getattr(model.optimizer, name))) == expected, name


def test_graphs_that_have_run_can_be_seen():
    import tensorflow as tf

    from tfdist._tensorflow_graphs import partitioned_graphs

    with partitioned_graphs() as graphs:
        tf.function(lambda: tf.random.uniform([3]) + 1)()
    names = [node.op for graph in graphs for node in graph.node]
    assert any("RandomUniform" in name for name in names)


def test_the_collectives_that_a_ring_replaces():
    """`RingExtended` puts its own launcher in place of TensorFlow's."""
    from tfdist import _tensorflow as private
    from tfdist.strategies.ring import RingLauncher

    launcher = RingLauncher.__mro__[1]
    signatures = {
        "all_reduce": "(self, input_tensor, control_input, options)",
        "batch_all_reduce": "(self, input_tensor_packs, options)",
        "_all_gather": "(self, input_tensor, options)",
        "all_gather": "(self, input_tensor, axis, options)",
        "all_reduce_indexed_slices": "(self, input_slices, options)",
    }
    for name, expected in signatures.items():
        found = inspect.signature(getattr(launcher, name))
        assert f"({', '.join(found.parameters)})" == expected, name
    base = private.CollectiveAllReduceExtended
    assert (
        str(inspect.signature(base._initialize_local)) == "(self, cluster_resolver, devices=None)"
    )
    created = inspect.signature(base._get_variable_creator_initial_value)
    assert list(created.parameters) == ["self", "replica_id", "device", "primary_var", "kwargs"]


def test_keras_still_asks_the_strategy_for_what_is_overridden():
    """The calls of Keras's trainer that `StrategyMixin` answers."""
    from keras.src.backend.tensorflow import trainer

    source = inspect.getsource(trainer)
    for call in (
        'strategy.reduce("MEAN", v, axis=0)',
        "self.distribute_strategy.run(step_function, args=(data,))",
        "self._distribute_strategy.experimental_distribute_dataset(",
        "tf.distribute.MultiWorkerMirroredStrategy",
    ):
        assert call in source, f"Keras's trainer no longer contains {call!r}"
