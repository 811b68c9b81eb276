"""The canary: every seam of Keras and TensorFlow that tfdist overrides, by name and signature.

When a new release moves one, the test that fails names it. Look at what changed there before the
supported range in setup.cfg is widened.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tfdist._tf.distribute import gradients_of_control_flow
from tfdist._tf.graphs import at_call, made_for_dataset, parameters_of
from tfdist._tf.variables import ASSIGNMENTS
from tfdist.horovod import program as horovod_program
from tfdist.keras import scope
from tfdist.keras.hooks import PROGRAM, STRATEGY, HookSet
from tfdist.strategies import constructors
from tfdist.strategies import scope as strategy_scope
from tfdist.strategies.parameter_server import hooks as served_hooks
from tfdist.strategies.parameter_server.step_function import Serving
from tfdist.strategies.pipeline import hooks as pipeline_hooks

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
    "TFOptimizer._overwrite_model_variables_with_average_value": "(self, trainable_variables)",
    "TFOptimizer._var_key": "(self, variable)",
    "TFOptimizer.add_variable_from_reference": (
        "(self, reference_variable, name=None, initializer='zeros')"
    ),
    "BaseOptimizer.apply": "(self, grads, trainable_variables=None)",
    "BaseOptimizer.scale_loss": "(self, loss)",
    "LossScaleOptimizer.scale_loss": "(self, loss)",
    "LossScaleOptimizer.check_finite": "(self, grads)",
    "LossScaleOptimizer._stateful_handle_non_finite_grads": "(self)",
    "Function.__call__": "(self, *args, **kwds)",
    "LossScaleOptimizer.build": "(self, var_list)",
    "SwapEMAWeights._tf_swap_variables": "(self, optimizer)",
    "SwapEMAWeights._tf_finalize_ema_values": "(self, optimizer)",
    "LossScaleOptimizer.apply": "(self, grads, trainable_variables=None)",
    "MultiOptimizer.apply": "(self, grads, trainable_variables=None)",
    "LossScaleOptimizer._tf_apply": "(self, grads, trainable_variables=None)",
    "keras.src.backend.tensorflow.trainer.reduce_per_replica": "(values, strategy, reduction)",
    "TFEpochIterator.__init__": "(self, distribute_strategy=None, *args, **kwargs)",
    "Trainer.get_metrics_result": "(self)",
    "Trainer._assert_compile_called": "(self, method_name=None)",
    "loss.Loss.__call__": "(self, y_true, y_pred, sample_weight=None)",
    "layer.Layer.__call__": "(self, *args, **kwargs)",
    "layer.Layer.add_weight": (
        "(self, *args, shape=None, initializer=None, dtype=None, trainable=True, autocast=True, "
        "regularizer=None, constraint=None, aggregation='none', overwrite_with_gradient=False, "
        "name=None)"
    ),
    "tensorflow.distribution_lib.list_devices": "(device_type=None)",
    "distribution.distribution_lib.distribute_tensor": "(tensor, layout)",
    "keras.distribution.distribute_tensor": "(tensor, layout)",
    "keras.distribution.get_device_count": "(device_type=None)",
    "keras.distribution.initialize": ("(job_addresses=None, num_processes=None, process_id=None)"),
    "global_state.set_global_attribute": "(name, value)",
    "input_lib._calculate_replicas_with_values": "(strategy, input_workers, optional_list)",
    "dense.Dense.call": "(self, inputs, training=None)",
    "einsum_dense.EinsumDense.call": "(self, inputs, training=None)",
    "base_conv.BaseConv.call": "(self, inputs)",
    "dropout.Dropout.call": "(self, inputs, training=False)",
    "activation.Activation.call": "(self, inputs)",
    "relu.ReLU.call": "(self, inputs)",
    "leaky_relu.LeakyReLU.call": "(self, inputs)",
    "elu.ELU.call": "(self, inputs)",
    "MultiHeadAttention._compute_attention": (
        "(self, query, key, value, attention_mask=None, training=None, "
        "return_attention_scores=False, use_causal_mask=False)"
    ),
    "GroupedQueryAttention._compute_attention": (
        "(self, query, key, value, attention_mask=None, training=None, use_causal_mask=False)"
    ),
    "ReplicaContext.merge_call": "(self, merge_fn, args=(), kwargs=None)",
    "ReplicaContext.all_gather": "(self, value, axis, options=None)",
    "RaggedTensor.to_tensor": "(self, default_value=None, name=None, shape=None)",
    "SyncOnReadVariable._get_cross_replica": "(self)",
    **{
        f"ResourceVariable.{name}": (
            f"(self, {what}, use_locking=None, name=None, read_value=True)"
        )
        for name, what in [("assign", "value"), ("assign_add", "delta"), ("assign_sub", "delta")]
    },
    **{
        f"ResourceVariable.{name}": (
            "(self, indices, updates, name=None)"
            if "_nd_" in name
            else "(self, sparse_delta, use_locking=False, name=None)"
        )
        for name in ASSIGNMENTS
        if name not in ("assign", "assign_add", "assign_sub")
    },
    "ResourceVariable._strided_slice_assign": (
        "(self, begin, end, strides, value, name, begin_mask, end_mask, ellipsis_mask, "
        "new_axis_mask, shrink_axis_mask)"
    ),
    "MirroredVariable._update_replica": "(self, update_fn, value, **kwargs)",
    "variables.Variable.__init__": (
        "(self, initializer, shape=None, dtype=None, trainable=True, autocast=True, "
        "aggregation='none', synchronization='auto', name=None, layout=None, **kwargs)"
    ),
    "_WrapperFunction._call_flat": "(self, args, captured_inputs)",
    "DatasetV2.__iter__": "(self) -> tensorflow.python.data.ops.iterator_ops.OwnedIterator",
    "TrackableSaver.save": (
        "(self, file_prefix, checkpoint_number=None, session=None, options=None)"
    ),
    "Variable._direct_assign": "(self, value)",
    "Variable._initialize_with_initializer": "(self, initializer)",
    "SeedGenerator.next": "(self, ordered=True)",
    "Sum.update_state": "(self, values, sample_weight=None)",
    "Trainer._aggregate_additional_loss": "(self, loss)",
    "Mean.update_state": "(self, values, sample_weight=None)",
    "MeanMetricWrapper.update_state": "(self, y_true, y_pred, sample_weight=None)",
    "keras.src.losses.loss.scale_loss_for_distribution": "(value)",
    "keras.src.losses.loss.unscale_loss_for_distribution": "(value)",
    "keras.src.losses.loss.reduce_weighted_values": (
        "(values, sample_weight=None, mask=None, reduction='sum_over_batch_size', dtype=None)"
    ),
    "keras.src.backend.tensorflow.nn._compute_moments_sync": "(x, axes, keepdims)",
    "BatchNormalization._moments": "(self, inputs, mask)",
    "variables.Variable.assign_add": "(self, value)",
    "variables.Variable.assign_sub": "(self, value)",
    "Embedding.call": "(self, inputs)",
    "Adafactor.build": "(self, var_list)",
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
    "TFEpochIterator._get_iterator": "(self)",
    "Trainer.compile": (
        "(self, optimizer='rmsprop', loss=None, loss_weights=None, metrics=None, "
        "weighted_metrics=None, run_eagerly=False, steps_per_execution=1, jit_compile='auto', "
        "auto_scale_loss=True)"
    ),
    "CallbackList.on_epoch_begin": "(self, epoch, logs=None)",
    "CallbackList.on_epoch_end": "(self, epoch, logs=None)",
    "CallbackList.on_train_batch_end": "(self, batch, logs=None)",
    "CallbackList.on_test_begin": "(self, logs=None)",
    "CallbackList.on_test_batch_end": "(self, batch, logs=None)",
    "CallbackList.on_predict_begin": "(self, logs=None)",
    "CallbackList.on_predict_batch_end": "(self, batch, logs=None)",
    "CallbackList.on_train_begin": "(self, logs=None)",
    "TerminateOnNaN.on_batch_end": "(self, batch, logs=None)",
    "RNN._create_state_variables": "(self, batch_size)",
    "RNN.build": "(self, sequences_shape, initial_state_shape=None)",
    "RNN.call": "(self, sequences, initial_state=None, mask=None, training=False)",
    "ArrayDataAdapter.get_tf_dataset": "(self)",
    "PyDatasetAdapter.get_tf_dataset": "(self)",
    "CallbackList.on_train_end": "(self, logs=None)",
    "BaseOptimizer.build": "(self, variables)",
    "BaseOptimizer._clip_gradients": "(self, grads)",
    "keras.src.saving.saving_lib._raise_loading_failure": "(error_msgs, warn_only=False)",
    "keras.optimizers.legacy.Adagrad": "(*args, **kwargs)",
    "keras.optimizers.legacy.Adam": "(*args, **kwargs)",
    "keras.optimizers.legacy.Ftrl": "(*args, **kwargs)",
    "keras.optimizers.legacy.RMSprop": "(*args, **kwargs)",
    "keras.optimizers.legacy.SGD": "(*args, **kwargs)",
    "Variable.__array__": "(self, dtype=None)",
    "Variable.__float__": "(self)",
    "Variable.__int__": "(self)",
    "Variable.__repr__": "(self)",
    "Variable.value": "a property",
    "TFExportArchive.write_out": "(self, filepath, options=None, verbose=True)",
    "TensorFlowTrainer.evaluate": (
        "(self, x=None, y=None, batch_size=None, verbose='auto', sample_weight=None, "
        "steps=None, callbacks=None, return_dict=False, **kwargs)"
    ),
    "TensorFlowTrainer.predict": (
        "(self, x, batch_size=None, verbose='auto', steps=None, callbacks=None)"
    ),
    "BackupAndRestore._save_model": "(self)",
    "BackupAndRestore.on_epoch_begin": "(self, epoch, logs=None)",
    "BackupAndRestore.on_train_begin": "(self, logs=None)",
    "BackupAndRestore.on_train_end": "(self, logs=None)",
    "CSVLogger.on_epoch_end": "(self, epoch, logs=None)",
    "CSVLogger.on_train_begin": "(self, logs=None)",
    "CSVLogger.on_train_end": "(self, logs=None)",
    "ModelCheckpoint._should_save_model": "(self, epoch, batch, logs, filepath)",
    "OrbaxCheckpoint.set_model": "(self, model)",
    "RemoteMonitor.on_epoch_end": "(self, epoch, logs=None)",
    "TensorBoard._configure_embeddings": "(self)",
    "TensorBoard._log_weights": "(self, epoch)",
    "TensorBoard._start_profiler": "(self, logdir)",
    "TensorBoard._train_writer": "a property",
    "TensorBoard._val_writer": "a property",
    "keras.src.export.export_litert": (
        "(model, filepath, input_signature=None, verbose=None, **kwargs)"
    ),
    "keras.src.export.export_onnx": (
        "(model, filepath, verbose=None, input_signature=None, opset_version=None, **kwargs)"
    ),
    "keras.src.export.export_openvino": (
        "(model, filepath, verbose=None, input_signature=None, **kwargs)"
    ),
    "keras.src.legacy.saving.legacy_h5_format.save_model_to_hdf5": (
        "(model, filepath, overwrite=True, include_optimizer=True)"
    ),
    "BaseOptimizer.save_own_variables": "(self, store)",
    "BaseOptimizer.variables": "a property",
    "LossScaleOptimizer.variables": "a property",
    "H5IOStore._get_h5_file": "(self, path_or_io, mode=None)",
    "keras.src.saving.saving_lib.get_attr_skipset": "(obj_type)",
    "keras.src.saving.saving_lib.save_model": (
        "(model, filepath, weights_format='h5', zipped=True)"
    ),
    "keras.src.saving.saving_lib.save_weights_only": (
        "(model, filepath, max_shard_size=None, objects_to_skip=None)"
    ),
    "keras.src.saving.saving_lib.load_model": (
        "(filepath, custom_objects=None, compile=True, safe_mode=True)"
    ),
    "keras.src.saving.saving_lib.load_weights_only": (
        "(model, filepath, skip_mismatch=False, objects_to_skip=None)"
    ),
    "keras.src.utils.io_utils.ask_to_proceed_with_overwrite": "(filepath)",
    "keras.src.utils.io_utils.print_msg": "(message, line_break=True)",
    "Model.export": (
        "(self, filepath, format='tf_saved_model', verbose=None, input_signature=None, **kwargs)"
    ),
    "GradientTape.gradient": (
        "(self, target, sources, output_gradients=None, "
        "unconnected_gradients=<UnconnectedGradients.NONE: 'none'>)"
    ),
    "GradientTape.jacobian": (
        "(self, target, sources, unconnected_gradients=<UnconnectedGradients.NONE: 'none'>, "
        "parallel_iterations=None, experimental_use_pfor=True)"
    ),
    "GradientTape.watch": "(self, tensor)",
    "tensorflow.python.ops.custom_gradient._graph_mode_decorator": "(f, args, kwargs)",
    "tensorflow.python.ops.parallel_for.control_flow_ops.pfor": (
        "(loop_fn, iters, fallback_to_while_loop=True, parallel_iterations=None, warn=False)"
    ),
    "tensorflow.gradients": (
        "(ys, xs, grad_ys=None, name='gradients', gate_gradients=False, aggregation_method=None, "
        "stop_gradients=None, unconnected_gradients=<UnconnectedGradients.NONE: 'none'>)"
    ),
    "nn.sparse_softmax_cross_entropy_with_logits": "(labels, logits, name=None)",
    "nn.softmax_cross_entropy_with_logits": "(labels, logits, axis=-1, name=None)",
    "tensorflow.numpy.argmax": "(x, axis=None, keepdims=False)",
    "tensorflow.numpy.matmul": "(x1, x2)",
    "tensorflow.numpy.repeat": "(x, repeats, axis=None)",
    "nn.compute_average_loss": "(per_example_loss, sample_weight=None, global_batch_size=None)",
    "nn.scale_regularization_loss": "(regularization_loss)",
    "BaseOptimizer.__init__": (
        "(self, learning_rate, weight_decay=None, clipnorm=None, clipvalue=None, "
        "global_clipnorm=None, use_ema=False, ema_momentum=0.99, ema_overwrite_frequency=None, "
        "loss_scale_factor=None, gradient_accumulation_steps=None, name=None, **kwargs)"
    ),
    "config.experimental.set_memory_growth": "(device, enable)",
    "config.experimental.set_virtual_device_configuration": "(device, logical_devices)",
    "config.experimental.set_visible_devices": "(devices, device_type=None)",
    "config.set_logical_device_configuration": "(device, logical_devices)",
    "config.set_visible_devices": "(devices, device_type=None)",
    "reset_default_graph": "() -> None",
    "threading.set_inter_op_parallelism_threads": "(num_threads)",
    "threading.set_intra_op_parallelism_threads": "(num_threads)",
}


#: Signatures that differ in other versions of Keras; None of what they do not have.
IN_VERSION = {
    "3.14": {
        "MultiOptimizer.apply": None,
        "keras.src.export.export_litert": ("(model, filepath, input_signature=None, **kwargs)"),
        "variables.Variable.__init__": SIGNATURES["variables.Variable.__init__"].replace(
            "layout=None, ", ""
        ),
        **{
            f"{name}._compute_attention": SIGNATURES[f"{name}._compute_attention"].replace(
                ", use_causal_mask=False", ""
            )
            for name in ("MultiHeadAttention", "GroupedQueryAttention")
        },
    },
    "3.16": {
        "keras.src.saving.saving_lib.save_model": "(model, filepath, zipped=True)",
    },
}
#: Names of Keras 3.16, and those of 3.15.
RENAMED = {
    "tensorflow.trainer.Trainer.": "tensorflow.trainer.TensorFlowTrainer.",
    "SavedModelExportArchive": "TFExportArchive",
    "tensorflow.ops.nn.": "tensorflow.nn.",
}
VERSION = ".".join(keras.__version__.split(".")[:2])


def expected_signatures():
    """The signatures of the version of Keras that is installed."""
    every = {**SIGNATURES, **IN_VERSION.get(VERSION, {})}
    return {name: signature for name, signature in every.items() if signature is not None}


def all_seams():
    """Every hook of tfdist."""
    served = served_hooks.hooks(Serving(_Servers(), lambda: None))
    piped = pipeline_hooks.hooks(lambda model: None, lambda function: None, lambda: None)
    return [
        *scope.all_hooks(),
        *HookSet(lambda: served, STRATEGY).wanted(),
        *HookSet(lambda: piped, STRATEGY + 1).wanted(),  # never together with `served`
        *HookSet(horovod_program.hooks, PROGRAM).wanted(),
        *HookSet(constructors.hooks, PROGRAM).wanted(),
        *HookSet(strategy_scope.hooks, PROGRAM).wanted(),
    ]


def seams():
    found = {}
    for hook in all_seams():
        path = hook.path
        for new, old in RENAMED.items():
            path = path.replace(new, old)
        found[path] = hook
    return found


class _Servers:
    """Servers that nobody asks anything: the hooks are listed, not installed."""

    shelves = None


@pytest.mark.parametrize("name", sorted(expected_signatures()))
def test_a_seam_is_where_it_was(name):
    found = [hook for path, hook in seams().items() if path.endswith(name)]
    assert found, f"tfdist hooks {name} no longer: take it out of this test"
    original = getattr(found[0].owner, found[0].name)
    is_property = isinstance(original, property)
    shown = "a property" if is_property else str(inspect.signature(original))
    assert shown == expected_signatures()[name], f"Keras moved {name}"


def test_every_seam_is_listed_above():
    stand_ins = {hook.path for hook in constructors.hooks()}  # pinned below
    unpinned = [
        path for path in seams() if path not in stand_ins and not path.endswith(tuple(SIGNATURES))
    ]
    assert unpinned == [], "add these with their signatures"


def test_the_constructors_that_stand_ins_replace():
    """Stand-ins answer the call of a class: 13 names of TensorFlow 2 in two places, 9 of v1."""
    import tensorflow as tf

    classes = [hook for hook in constructors.hooks() if isinstance(hook.owner, type(tf))]
    originals = [getattr(hook.owner, hook.name) for hook in classes]
    kinds = [each for each in originals if isinstance(each, type)]
    assert len(kinds) == 2 * 13 + 9
    assert all(type(kind).__call__ is type.__call__ for kind in kinds)
    (function,) = {each for each in originals if not isinstance(each, type)}
    assert str(inspect.signature(function)) == "(strategy)"
    coordinator = tf.distribute.coordinator.ClusterCoordinator
    assert str(inspect.signature(coordinator.__new__)) == "(cls, strategy)"


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
    from tfdist._tf import distribute as private

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
    assert "training" in keras.layers.Dropout(0.5)._call_context_args
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

    from tfdist._tf.graphs import partitioned_graphs

    with partitioned_graphs() as graphs:
        tf.function(lambda: tf.random.uniform([3]) + 1)()
    names = [node.op for graph in graphs for node in graph.node]
    assert any("RandomUniform" in name for name in names)


def test_the_collectives_that_a_ring_replaces():
    """`RingExtended` puts its own launcher in place of TensorFlow's."""
    from tfdist._tf import distribute as private
    from tfdist.comm.launchers import RingLauncher

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


@pytest.mark.parametrize("branch", [False, True])
def test_graphs_of_gradients_of_control_flow_are_known(branch: bool) -> None:
    """`tfdist._tf.distribute` tells them by two private attributes of TensorFlow's graphs."""
    found: list[tuple[int, int]] = []

    @tf.custom_gradient
    def noted(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
        forward = len(gradients_of_control_flow())

        def backward(upstream: tf.Tensor) -> tf.Tensor:
            found.append((forward, len(gradients_of_control_flow())))
            return upstream

        return tf.identity(x), backward

    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.cond(x > 0, lambda: noted(x), lambda: x) if branch else noted(x)

    @tf.function
    def gradient(x: tf.Tensor) -> Any:
        y = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, step(h)), [0, x])[1]
        return tf.gradients(y, x)

    gradient.get_concrete_function(tf.constant(1.0))
    assert set(found) == {(0, 2 if branch else 1)}


def test_the_parameters_of_all_raw_ops_are_known() -> None:
    """`run_again` finds what `tf.raw_ops` calls the inputs and attributes of an op."""
    wrong = {}
    for name in dir(tf.raw_ops):
        op_def = op_def_registry.get(name)
        if op_def is not None and op_def.input_arg:
            taken = inspect.signature(getattr(tf.raw_ops, name)).parameters.keys() - {"name"}
            if unknown := taken - set(parameters_of(op_def).values()):
                wrong[name] = unknown
    assert not wrong


@pytest.mark.parametrize("kind", ["once", "in a loop", "in another function", "in a branch"])
def test_a_function_asks_for_a_value_at_each_call(kind: str) -> None:
    values = iter([1.0, 2.0])

    def value() -> Any:
        return at_call("key", lambda: tf.constant(next(values)), tf.TensorSpec([]))

    # TensorFlow does not feed a branch what a function that it calls asks for.
    read = value if kind == "in a branch" else tf.function(value)

    @tf.function
    def called(chosen: tf.Tensor) -> Any:
        if kind == "in a loop":
            return tf.while_loop(lambda i, _: i < 3, lambda i, t: (i + 1, t + read()), (0, 0.0))[1]
        if kind == "in a branch":
            return tf.cond(chosen, read, lambda: 0.0)
        return read() + read()

    function = read if kind == "once" else lambda: called(tf.constant(True))
    times = {"in a loop": 3, "in another function": 2}.get(kind, 1)
    assert [float(function()), float(function())] == [times, 2 * times]


@pytest.mark.parametrize("traced_before", [False, True])
def test_a_data_set_asks_for_a_value_when_it_is_made(traced_before: bool) -> None:
    asked = []

    def value() -> Any:
        asked.append(made_for_dataset())
        return tf.constant(1.0)

    @tf.function
    def read(_: Any) -> Any:
        return at_call("key", value, tf.TensorSpec([]))

    if traced_before:
        read(tf.constant(0, tf.int64))
    assert len(list(tf.data.Dataset.range(3).map(read))) == 3
    assert asked == [*([False] if traced_before else []), True]
