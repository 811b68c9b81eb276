"""The types of TensorFlow's and Keras's objects, each with the members that tfdist uses.

Neither library can be read by mypy, to which all of their names mean `Any`. The protocols here let
mypy check what tfdist does with tensors, variables, models and the like. They name no class of
either library, so every room may import them. At run time nothing is an instance of them.
"""

from tfdist.types.models import Adam as Adam
from tfdist.types.models import Backup as Backup
from tfdist.types.models import Callback as Callback
from tfdist.types.models import CallbackList as CallbackList
from tfdist.types.models import DataAdapter as DataAdapter
from tfdist.types.models import EmbeddingLayer as EmbeddingLayer
from tfdist.types.models import EpochIterator as EpochIterator
from tfdist.types.models import Functional as Functional
from tfdist.types.models import History as History
from tfdist.types.models import Layer as Layer
from tfdist.types.models import Logs as Logs
from tfdist.types.models import LossScaler as LossScaler
from tfdist.types.models import Metric as Metric
from tfdist.types.models import Model as Model
from tfdist.types.models import Optimizer as Optimizer
from tfdist.types.models import SeedGenerator as SeedGenerator
from tfdist.types.models import StatefulLayer as StatefulLayer
from tfdist.types.models import StatelessScope as StatelessScope
from tfdist.types.sessions import ClusterSpec as ClusterSpec
from tfdist.types.sessions import ConfigProto as ConfigProto
from tfdist.types.sessions import FeatureColumn as FeatureColumn
from tfdist.types.sessions import Features as Features
from tfdist.types.sessions import MonitoredSession as MonitoredSession
from tfdist.types.sessions import OnnxGraph as OnnxGraph
from tfdist.types.sessions import OnnxModel as OnnxModel
from tfdist.types.sessions import OnnxSession as OnnxSession
from tfdist.types.sessions import Optimizer1 as Optimizer1
from tfdist.types.sessions import OptimizerChoice as OptimizerChoice
from tfdist.types.sessions import Partitioner as Partitioner
from tfdist.types.sessions import RunArgs as RunArgs
from tfdist.types.sessions import RunContext as RunContext
from tfdist.types.sessions import RunValues as RunValues
from tfdist.types.sessions import Saver as Saver
from tfdist.types.sessions import SavingHook as SavingHook
from tfdist.types.sessions import Scaffold as Scaffold
from tfdist.types.sessions import Server as Server
from tfdist.types.sessions import Session as Session
from tfdist.types.sessions import SessionHook as SessionHook
from tfdist.types.sessions import SessionTimer as SessionTimer
from tfdist.types.sessions import SignatureDef as SignatureDef
from tfdist.types.tensors import AnyStrategy as AnyStrategy
from tfdist.types.tensors import Array as Array
from tfdist.types.tensors import ConcreteFunction as ConcreteFunction
from tfdist.types.tensors import CoordinatedWorker as CoordinatedWorker
from tfdist.types.tensors import Dataset as Dataset
from tfdist.types.tensors import DatasetIterator as DatasetIterator
from tfdist.types.tensors import DeviceSpec as DeviceSpec
from tfdist.types.tensors import DType as DType
from tfdist.types.tensors import FuncGraph as FuncGraph
from tfdist.types.tensors import Function as Function
from tfdist.types.tensors import Gradient as Gradient
from tfdist.types.tensors import GradientTape as GradientTape
from tfdist.types.tensors import Graph as Graph
from tfdist.types.tensors import GraphDef as GraphDef
from tfdist.types.tensors import IndexedSlices as IndexedSlices
from tfdist.types.tensors import Json as Json
from tfdist.types.tensors import KerasVariable as KerasVariable
from tfdist.types.tensors import Launcher as Launcher
from tfdist.types.tensors import Operand as Operand
from tfdist.types.tensors import Operation as Operation
from tfdist.types.tensors import ProcessSet as ProcessSet
from tfdist.types.tensors import Scalar as Scalar
from tfdist.types.tensors import Shape as Shape
from tfdist.types.tensors import Shard as Shard
from tfdist.types.tensors import SomeGradient as SomeGradient
from tfdist.types.tensors import SparseTensor as SparseTensor
from tfdist.types.tensors import Strategy as Strategy
from tfdist.types.tensors import Structure as Structure
from tfdist.types.tensors import Tensor as Tensor
from tfdist.types.tensors import TensorSpec as TensorSpec
from tfdist.types.tensors import Variable as Variable
