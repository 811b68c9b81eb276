"""The Estimator API, which TensorFlow has dropped: `tf.estimator` becomes `tfdist.estimator`."""

from tfdist.utils.lazy import lazy_attributes

#: The module of each public name.
_MODULES = {
    "BaselineClassifier": "tfdist.estimator.canned.baseline",
    "BaselineEstimator": "tfdist.estimator.canned.baseline",
    "BaselineRegressor": "tfdist.estimator.canned.baseline",
    "BinaryClassHead": "tfdist.estimator.canned.class_heads",
    "DNNClassifier": "tfdist.estimator.canned.dnn",
    "DNNEstimator": "tfdist.estimator.canned.dnn",
    "DNNLinearCombinedClassifier": "tfdist.estimator.canned.combined",
    "DNNLinearCombinedEstimator": "tfdist.estimator.canned.combined",
    "DNNLinearCombinedRegressor": "tfdist.estimator.canned.combined",
    "DNNRegressor": "tfdist.estimator.canned.dnn",
    "Head": "tfdist.estimator.canned.head",
    "LinearClassifier": "tfdist.estimator.canned.linear",
    "LinearEstimator": "tfdist.estimator.canned.linear",
    "LinearRegressor": "tfdist.estimator.canned.linear",
    "MultiClassHead": "tfdist.estimator.canned.class_heads",
    "MultiLabelHead": "tfdist.estimator.canned.multi_label_head",
    "RegressionHead": "tfdist.estimator.canned.regression_head",
    "classifier_parse_example_spec": "tfdist.estimator.canned.parsing",
    "model_to_estimator": "tfdist.estimator.keras_models",
    "regressor_parse_example_spec": "tfdist.estimator.canned.parsing",
    "Estimator": "tfdist.estimator.estimator",
    "EstimatorSpec": "tfdist.estimator.spec",
    "ModeKeys": "tfdist.estimator.spec",
    "RunConfig": "tfdist.estimator.run_config",
    "EvalSpec": "tfdist.estimator.job_specs",
    "TrainSpec": "tfdist.estimator.job_specs",
    "train_and_evaluate": "tfdist.estimator.jobs",
    "Exporter": "tfdist.estimator.exporters",
    "FinalExporter": "tfdist.estimator.exporters",
    "LatestExporter": "tfdist.estimator.exporters",
    "BestExporter": "tfdist.estimator.best_exporter",
    "add_metrics": "tfdist.estimator.added_metrics",
    "experimental": "tfdist.estimator.experimental",
    "export": "tfdist.estimator.export",
    "VocabInfo": "tfdist.estimator.warm_starting",
    "WarmStartSettings": "tfdist.estimator.warm_starting",
    **dict.fromkeys(
        (
            "CheckpointSaverHook",
            "CheckpointSaverListener",
            "FeedFnHook",
            "FinalOpsHook",
            "GlobalStepWaiterHook",
            "LoggingTensorHook",
            "NanLossDuringTrainingError",
            "NanTensorHook",
            "ProfilerHook",
            "Scaffold",
            "SecondOrStepTimer",
            "SessionRunArgs",
            "SessionRunContext",
            "SessionRunHook",
            "SessionRunValues",
            "StepCounterHook",
            "StopAtStepHook",
            "SummarySaverHook",
        ),
        "tensorflow.compat.v1.train",  # TensorFlow still ships them.
    ),
}

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

__getattr__, __dir__ = lazy_attributes(__all__, _MODULES, "tfdist.estimator", _GONE)
