"""The surface that users lean on: a change here is a change for them.

Flags, and whom they reach, are in test_wiring.py; the signatures of seams in test_seams.py.
"""

from __future__ import annotations

import collections

import pytest
from typer.main import get_command

import tfdist
from tests.unit.test_seams import all_seams
from tfdist import environment, errors
from tfdist._tf.variables import ASSIGNMENTS
from tfdist.cli.main import app
from tfdist.config.server_options import WIRE_DTYPES
from tfdist.config.strategy_config import MODES, STRATEGIES
from tfdist.config.strategy_spec import specs
from tfdist.config.update_options import ON_STALE
from tfdist.gradients import optimizer_state

#: The modules whose hooks share a seam, the innermost first. Later ones see what earlier ones did.
HOOK_ORDER = {
    **{
        f"ResourceVariable.{name}": [
            "strategies.parameter_server.hooks",
            "strategies.pipeline.hooks",
        ]
        for name in ASSIGNMENTS
    },
    "ResourceVariable._strided_slice_assign": [
        "keras.plain_variables",
        "strategies.parameter_server.hooks",
        "strategies.pipeline.hooks",
    ],
    "Variable._direct_assign": ["keras.weights", "strategies.parameter_server.hooks"],
    "BaseOptimizer._clip_gradients": ["keras.updating", "keras.zero"],
    "BaseOptimizer.build": ["keras.updating", "keras.zero", "keras.layouts"],
    "Function.__call__": ["keras.functions", "keras.functions"],
    "Embedding.call": ["keras.tensor_parallel", "strategies.parameter_server.hooks"],
    "Layer.__call__": [
        "keras.losses",
        "keras.sharded_weights",
        "keras.layouts",
        "keras.replica_attributes",
    ],
    "Variable.value": ["keras.weights", "strategies.parameter_server.hooks"],
    "TFExportArchive.write_out": [
        "keras.saving",
        "strategies.parameter_server.hooks",
        "strategies.pipeline.hooks",
    ],
    "TFEpochIterator.__init__": ["keras.backup", "keras.predictions", "keras.feeding"],
    "TensorFlowTrainer._make_function": ["keras.executions", "keras.batch_logs"],
    "TensorFlowTrainer._get_metrics_result_or_logs": [
        "keras.elastic",
        "strategies.parameter_server.hooks",
        "strategies.pipeline.hooks",
    ],
    "TensorFlowTrainer.evaluate": ["keras.updating", "strategies.pipeline.hooks"],
    "TensorFlowTrainer.fit": [
        "keras.callbacks",
        "keras.elastic",
        "keras.feeding",
        "strategies.parameter_server.hooks",
    ],
    "TensorFlowTrainer.make_predict_function": [
        "keras.predictions",
        "strategies.parameter_server.hooks",
    ],
    "TensorFlowTrainer.make_train_function": [
        "strategies.parameter_server.hooks",
        "strategies.pipeline.hooks",
    ],
    "TensorFlowTrainer.predict": ["keras.updating", "strategies.pipeline.hooks"],
    "TensorFlowTrainer.test_on_batch": ["keras.batches", "strategies.parameter_server.hooks"],
    "TensorFlowTrainer.train_on_batch": ["keras.batches", "strategies.parameter_server.hooks"],
    "BackupAndRestore._save_model": ["keras.backup", "strategies.parameter_server.hooks"],
    "CallbackList.on_epoch_end": [
        "keras.callbacks",
        "keras.reporting",
        "keras.updating",
        "strategies.parameter_server.reporting",
        "strategies.pipeline.hooks",
    ],
    "CallbackList.on_train_batch_end": ["keras.stopping", "keras.updating", "keras.reporting"],
    "CallbackList.on_train_begin": ["keras.callbacks", "strategies.parameter_server.reporting"],
    "CallbackList.on_train_end": [
        "keras.callbacks",
        "keras.reporting",
        "keras.updating",
        "strategies.parameter_server.reporting",
        "strategies.pipeline.hooks",
    ],
    "export.export_litert": ["keras.saving", "strategies.pipeline.hooks"],
    "export.export_onnx": ["keras.saving", "strategies.pipeline.hooks"],
    "export.export_openvino": ["keras.saving", "strategies.pipeline.hooks"],
    "legacy_h5_format.save_model_to_hdf5": [
        "keras.saving",
        "strategies.parameter_server.hooks",
        "strategies.pipeline.hooks",
    ],
    "Adam.update_step": ["keras.optimizers", "keras.optimizers"],
    "BaseOptimizer.apply": ["keras.optimizers", "strategies.parameter_server.optimizers"],
    "LossScaleOptimizer.apply": [
        "keras.optimizers",
        "strategies.parameter_server.optimizers",
        "horovod.averaging",
    ],
    "LossScaleOptimizer.scale_loss": [
        "keras.optimizers",
        "strategies.parameter_server.optimizers",
    ],
    "SeedGenerator.next": ["keras.weights", "strategies.parameter_server.hooks"],
    "saving_lib.save_model": [
        "keras.saving",
        "keras.sharded_files",
        "strategies.parameter_server.hooks",
        "strategies.pipeline.hooks",
    ],
    "saving_lib.save_weights_only": [
        "keras.saving",
        "keras.sharded_files",
        "strategies.parameter_server.hooks",
        "strategies.pipeline.hooks",
    ],
    "EpochIterator._enumerate_iterator": [
        "keras.iterators",
        "keras.input_comparison",
        "keras.backup",
    ],
    "Trainer.compile": [
        "keras.updating",
        "keras.building",
        "strategies.parameter_server.hooks",
        "horovod.program",
    ],
    "GradientTape.gradient": [
        "keras.loops",
        "keras.losses",
        "keras.optimizers",
        "keras.sharded_weights",
        "strategies.parameter_server.hooks",
    ],
    "tensorflow.gradients": [
        "keras.losses",
        "keras.optimizers",
        "keras.sharded_weights",
        "strategies.parameter_server.hooks",
    ],
    "GradientTape.jacobian": ["keras.loops", "keras.sharded_weights"],
    "GradientTape.watch": ["keras.loops", "keras.sharded_weights"],
}

#: Import paths that the documentation names.
DOCUMENTED = (
    "tfdist.config.STRATEGIES",
    "tfdist.config.StrategyConfig",
    "tfdist.horovod.callbacks",
    "tfdist.exporting.compare",
    "tfdist.horovod.DistributedOptimizer",
    "tfdist.strategies.pipeline.Pipeline",
    "tfdist.strategies.parameter_server.ParameterServer",
    "tfdist.strategies.horovod.Horovod",
)


def test_public_names():
    assert sorted(tfdist.__all__) == [
        "ConfigError",
        "EquivalenceWarning",
        "Horovod",
        "Mirrored",
        "MultiWorker",
        "ParameterServer",
        "Pipeline",
        "Single",
        "StartError",
        "TfdistError",
        "estimator",
        "export",
        "launch",
        "place",
        "plan_placement",
        "strategy",
    ]
    for name in tfdist.__all__:
        assert getattr(tfdist, name) is not None


@pytest.mark.parametrize("path", DOCUMENTED)
def test_documented_import_paths(path):
    module, _, name = path.rpartition(".")
    assert getattr(__import__(module, fromlist=[name]), name) is not None


def test_commands():
    commands = get_command(app).commands
    assert sorted(commands) == [
        *("build-horovod", "config", "consolidate", "doctor", "export", "init", "report", "run"),
        "verify",
    ]
    for command in commands.values():
        assert command.help, command.name


def test_exit_statuses():
    kinds = (errors.TfdistError, errors.ConfigError, errors.StartError, errors.TaskFailedError)
    assert [kind.exit_status for kind in kinds[:3]] == [1, 2, 3]
    assert errors.TaskFailedError("it failed", 7).exit_status == 7


def test_environment_variables():
    own = sorted(name for name in environment.VARIABLES if name.startswith("TFDIST_"))
    assert own == [
        "TFDIST_CLUSTER",
        "TFDIST_CONFIG",
        "TFDIST_ELASTIC",
        "TFDIST_LAUNCHED",
        "TFDIST_PODS",
        "TFDIST_RECORD",
        "TFDIST_REPLICAS",
        "TFDIST_RESULT",
        "TFDIST_SEED",
        "TFDIST_SERVICE",
        "TFDIST_TASK",
        "TFDIST_VERIFY_STEPS",
        "TFDIST_WRITTEN",
    ]


def test_checkpoint_keys():
    """Where a checkpoint keeps pending gradients: files that exist have this name in them."""
    assert optimizer_state._ATTRIBUTE == "tfdist_updates"


def test_strategies_and_their_modes():
    assert list(STRATEGIES) == list(MODES) == list(specs())
    assert list(STRATEGIES) == [
        *("single", "mirrored", "multi_worker", "horovod", "parameter_server"),
        "pipeline",
    ]
    assert list(ON_STALE) == ["wait", "drop", "damp"]
    assert WIRE_DTYPES == ("float32", "bfloat16", "float16")
    assert MODES == {
        "single": ("sync",),
        "mirrored": ("sync", "stale", "local"),
        "multi_worker": ("sync", "stale", "local"),
        "horovod": ("sync", "stale", "local"),
        "parameter_server": ("sync", "async", "stale"),
        "pipeline": ("sync",),
    }


def test_the_order_of_hooks_on_shared_seams():
    found = collections.defaultdict(list)
    for hook in sorted(all_seams(), key=lambda hook: hook.priority):
        make = getattr(hook.make, "func", hook.make)  # of a partial
        found[hook.path].append(make.__module__.removeprefix("tfdist."))
    shared = {
        ".".join(path.split(".")[-2:]): modules
        for path, modules in found.items()
        if len(modules) > 1
    }
    assert shared == HOOK_ORDER
