"""The Estimator API, which TensorFlow has dropped: `tf.estimator` becomes `tfdist.estimator`."""

from tfdist.utils.imports import lazy_attributes

#: The public names of each module.
_NAMES = {
    "tfdist.estimator.canned.columns": "classifier_parse_example_spec regressor_parse_example_spec",
    "tfdist.estimator.canned.estimators": (
        "BaselineClassifier BaselineEstimator BaselineRegressor DNNClassifier DNNEstimator "
        "DNNLinearCombinedClassifier DNNLinearCombinedEstimator DNNLinearCombinedRegressor "
        "DNNRegressor LinearClassifier LinearEstimator LinearRegressor"
    ),
    "tfdist.estimator.canned.head": "Head",
    "tfdist.estimator.canned.heads": "BinaryClassHead MultiClassHead MultiLabelHead RegressionHead",
    "tfdist.estimator.estimator": "Estimator add_metrics",
    "tfdist.estimator.experimental": "experimental",
    "tfdist.estimator.export": "export",
    "tfdist.estimator.exporters": "BestExporter Exporter FinalExporter LatestExporter",
    "tfdist.estimator.jobs": "EvalSpec TrainSpec train_and_evaluate",
    "tfdist.estimator.keras_models": "model_to_estimator",
    "tfdist.estimator.run_config": "RunConfig",
    "tfdist.estimator.spec": "EstimatorSpec ModeKeys",
    "tfdist.estimator.warm_starting": "VocabInfo WarmStartSettings",
    # TensorFlow still ships these.
    "tensorflow.compat.v1.train": (
        "CheckpointSaverHook CheckpointSaverListener FeedFnHook FinalOpsHook GlobalStepWaiterHook "
        "LoggingTensorHook NanLossDuringTrainingError NanTensorHook ProfilerHook Scaffold "
        "SecondOrStepTimer SessionRunArgs SessionRunContext SessionRunHook SessionRunValues "
        "StepCounterHook StopAtStepHook SummarySaverHook"
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)

#: The names that `tf.estimator` had, and their replacements.
_GONE = {
    **dict.fromkeys(
        ("BoostedTreesClassifier", "BoostedTreesEstimator", "BoostedTreesRegressor"),
        "Its kernels are gone from TensorFlow. Use the package tensorflow_decision_forests.",
    ),
    "inputs": "Make the input with tf.data, such as tf.data.Dataset.from_tensor_slices(...).",
    "tpu": "Train on TPUs with Keras under tf.distribute.TPUStrategy.",
}

__getattr__, __dir__ = lazy_attributes(__name__, _MODULES, _GONE)
