"""Every private name of Keras that tfdist uses, as of Keras 3.14 to 3.16.

The names are those of 3.15. `tests/unit/test_seams.py` pins the signatures of those that are
hooked.
"""

from __future__ import annotations

import keras
from keras.src import api_export, tree
from keras.src import backend as keras_backend
from keras.src import callbacks as keras_callbacks
from keras.src import export as keras_export
from keras.src import ops as keras_ops
from keras.src import optimizers as keras_optimizers
from keras.src.backend.common import KerasVariable, global_state
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.tensorflow import distribution_lib as distribution_backend
from keras.src.backend.tensorflow import random as random_module
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.callbacks import BackupAndRestore
from keras.src.callbacks.callback_list import CallbackList
from keras.src.callbacks.orbax_checkpoint import OrbaxCheckpoint
from keras.src.distribution import distribution_lib
from keras.src.layers.convolutional.base_conv import BaseConv
from keras.src.layers.core.embedding import Embedding
from keras.src.layers.rnn.rnn import RNN
from keras.src.legacy.saving import legacy_h5_format
from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group
from keras.src.losses import loss as loss_module
from keras.src.losses.loss import unscale_loss_for_distribution
from keras.src.metrics import reduction_metrics
from keras.src.models import Functional
from keras.src.optimizers.adam import Adam
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.random.seed_generator import SeedGenerator
from keras.src.saving import object_registration, saving_lib
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays
from keras.src.trainers.data_adapters.array_slicing import convert_to_sliceable
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.utils import file_utils, io_utils
from keras.src.utils.naming import to_snake_case
from keras.src.utils.python_utils import pythonify_logs

try:  # Keras 3.16
    from keras.src.backend.tensorflow.export import SavedModelExportArchive as TFExportArchive
    from keras.src.backend.tensorflow.ops import nn as tensorflow_nn
    from keras.src.backend.tensorflow.ops import numpy as tensorflow_numpy
    from keras.src.backend.tensorflow.ops.core import Variable
    from keras.src.backend.tensorflow.trainer import TFEpochIterator
    from keras.src.backend.tensorflow.trainer import Trainer as TensorFlowTrainer
    from keras.src.trainers.trainer import BaseTrainer as Trainer
except ImportError:
    from keras.src.backend.tensorflow import nn as tensorflow_nn
    from keras.src.backend.tensorflow import numpy as tensorflow_numpy
    from keras.src.backend.tensorflow.core import Variable
    from keras.src.backend.tensorflow.export import TFExportArchive
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, TFEpochIterator
    from keras.src.trainers.trainer import Trainer
try:  # Keras 3.15
    from keras.src.optimizers.multi_optimizer import MultiOptimizer
except ImportError:
    MultiOptimizer = None

from tfdist.types import Optimizer

__all__ = [
    "RESETS_METRICS",
    "RNN",
    "Adam",
    "ArrayDataAdapter",
    "BackupAndRestore",
    "BaseConv",
    "BaseOptimizer",
    "CallbackList",
    "Embedding",
    "EpochIterator",
    "Functional",
    "GeneratorDataAdapter",
    "KerasSaveable",
    "KerasVariable",
    "LossScaleOptimizer",
    "MultiOptimizer",
    "OrbaxCheckpoint",
    "PyDatasetAdapter",
    "SeedGenerator",
    "TFEpochIterator",
    "TFExportArchive",
    "TFOptimizer",
    "TensorFlowTrainer",
    "Trainer",
    "Variable",
    "api_export",
    "can_convert_arrays",
    "convert_to_sliceable",
    "data_adapter_utils",
    "distribution_backend",
    "distribution_lib",
    "file_utils",
    "global_state",
    "in_stateless_scope",
    "in_symbolic_scope",
    "io_utils",
    "keras_backend",
    "keras_callbacks",
    "keras_export",
    "keras_ops",
    "keras_optimizers",
    "legacy_h5_format",
    "load_optimizer_weights_from_hdf5_group",
    "loss_module",
    "object_registration",
    "pythonify_logs",
    "random_module",
    "reduction_metrics",
    "saving_lib",
    "tensorflow_nn",
    "tensorflow_numpy",
    "tensorflow_trainer",
    "to_snake_case",
    "tree",
    "unpack_x_y_sample_weight",
    "unscale_loss_for_distribution",
    "unwrapped",
]

#: Whether `train_on_batch` and `test_on_batch` begin with metrics at zero, as from Keras 3.15 on.
RESETS_METRICS = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 15)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer that a `LossScaleOptimizer` holds, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)
