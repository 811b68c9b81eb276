"""TF_CONFIG and its like as schedulers write them, with names and numbers of the kind they use."""

from __future__ import annotations

import json

#: Kubeflow's operator for TFJob: chief, workers and ps, each pod behind its own service. It leaves
#: evaluators out of the cluster.
TFJOB = (
    '{"cluster":{"chief":["mnist-chief-0.default.svc:2222"],'
    '"ps":["mnist-ps-0.default.svc:2222","mnist-ps-1.default.svc:2222"],'
    '"worker":["mnist-worker-0.default.svc:2222","mnist-worker-1.default.svc:2222"]},'
    '"task":{"type":"%s","index":%d},"environment":"cloud"}'
)
#: The same with `enableDynamicWorker: true`, for worker 1.
TFJOB_DYNAMIC = (
    '{"sparseCluster":{"worker":{"1":"mnist-worker-1.default.svc:2222"},'
    '"ps":["mnist-ps-0.default.svc:2222","mnist-ps-1.default.svc:2222"]},'
    '"task":{"type":"worker","index":1}}'
)
#: Volcano's plugin for TensorFlow.
VOLCANO = (
    '{"cluster":{"ps":["tf-job-ps-0.tf-job:2222"],'
    '"worker":["tf-job-worker-0.tf-job:2222","tf-job-worker-1.tf-job:2222"]},'
    '"task":{"type":"ps","index":0}}'
)
#: Vertex AI, the variable of all frameworks.
CLUSTER_SPEC = (
    '{"cluster":{"workerpool0":["cmle-training-workerpool0-ab-0:2222"],'
    '"workerpool1":["cmle-training-workerpool1-ab-0:2222","cmle-training-workerpool1-ab-1:2222"],'
    '"workerpool2":["cmle-training-workerpool2-ab-0:2222"]},'
    '"environment":"cloud","task":{"type":"%s","index":%d,"trial":"7"},'
    '"job":"{\\"python_module\\":\\"\\",\\"package_uris\\":[],\\"job_args\\":[]}",'
    '"open_ports":[3333]}'
)
#: Vertex AI, TensorFlow's variable in the same job.
VERTEX = (
    '{"cluster":{"chief":["cmle-training-workerpool0-ab-0:2222"],'
    '"worker":["cmle-training-workerpool1-ab-0:2222","cmle-training-workerpool1-ab-1:2222"],'
    '"ps":["cmle-training-workerpool2-ab-0:2222"]},'
    '"environment":"cloud","job":"{\\"scale_tier\\":\\"CUSTOM\\",\\"region\\":\\"us-central1\\"}",'
    '"task":{"cloud":"w93a1503672d4dd09-ml","index":%d,"trial":"7","type":"%s"}}'
)
#: AI Platform Training with a runtime of TensorFlow 1: the chief is the master.
AI_PLATFORM = (
    '{"environment":"cloud","cluster":{"worker":["cmle-training-worker-ab-0:2222"],'
    '"ps":["cmle-training-ps-ab-0:2222"],"master":["cmle-training-master-ab-0:2222"]},'
    '"job":{"args":["--epochs","3"],"python_module":"trainer.task"},'
    '"task":{"type":"master","index":0}}'
)
#: Ray Train's TensorflowTrainer: json.dumps of the addresses its workers report.
RAY = json.dumps(
    {
        "cluster": {"worker": ["10.0.3.17:41523", "10.0.3.17:38211", "10.0.3.18:40017"]},
        "task": {"type": "worker", "index": 2},
    }
)
#: SageMaker's TensorFlow container with parameter servers: a worker and a ps on each host.
SAGEMAKER = (
    '{"cluster": {"master": ["algo-1:2222"], "worker": ["algo-2:2222"], '
    '"ps": ["algo-1:2223", "algo-2:2223"]}, "environment": "cloud", '
    '"task": {"type": "worker", "index": 0}}'
)
#: SageMaker's TensorFlow container with its multi-worker mirrored strategy.
SAGEMAKER_MIRRORED = (
    '{"cluster": {"worker": ["algo-1:8890", "algo-2:8890"]}, '
    '"task": {"type": "worker", "index": 1}}'
)
