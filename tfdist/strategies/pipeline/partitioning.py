"""Cutting a Functional model into chunks that run one after the other."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.keras.example_pairs import Examples
from tfdist.keras.stateless import Assigning
from tfdist.placement.plan import Plan, costs_of, split
from tfdist.placement.units import Unit, devices_of, graph_of, nodes_in_order, units_of
from tfdist.types import Functional, KerasVariable, Layer, Model, Structure

__all__ = ["Call", "Chunk", "Cut", "Key", "check_stateless", "cut"]

#: A tensor of the graph: the calls of nested models that it is in, and the symbolic tensor's id.
Key = tuple[tuple[int, ...], int]


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer or an operation.

    Attributes:
        path: the unit's path.
        node: Keras's node.
        reads: the tensors that it reads, in the order of the node's.
        writes: the tensors that it makes.
    """

    path: str
    node: Any
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]

    @property
    def layer(self) -> Layer | None:
        """The layer; None for an operation without weights."""
        operation = self.node.operation
        return operation if isinstance(operation, keras.Layer) else None


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """A contiguous part of a model.

    Attributes:
        calls: in the order in which they run.
        layers: those whose first call is among them, each once. It holds their variables.
        reads: tensors that come from earlier chunks or are inputs of the model; and the weights of
            layers that an earlier chunk holds, under the keys of `borrowed`.
        writes: tensors that later chunks read, or outputs of the model for the last one; and
            weights, under the keys of `lent`.
        borrowed: the weights of other chunks' layers that it calls.
        lent: its weights that later chunks read.
    """

    calls: tuple[Call, ...]
    layers: tuple[Any, ...]
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    borrowed: Mapping[Key, KerasVariable]
    lent: Mapping[Key, KerasVariable]


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A model in chunks.

    Attributes:
        graph: the Functional graph.
        chunks: the parts.
        inputs: the model's inputs, flat.
        chunk_of: the chunk of each unit, by path.
        table: the plan of the chunks in words, if they were measured.
        held: the places of the examples in what chunks write, filled in when they are traced.
    """

    graph: Functional
    chunks: tuple[Chunk, ...]
    inputs: tuple[Key, ...]
    chunk_of: Mapping[str, int]
    table: str
    held: dict[Key, Examples] = dataclasses.field(default_factory=dict)


def cut(
    model: Model,
    inputs: Structure,
    count: int,
    wanted: Sequence[str] | Mapping[str, int] | None,
) -> Cut:
    """Cuts a model.

    Args:
        model: a Functional or Sequential model that is built; nested ones are taken apart.
        inputs: a microbatch, to measure with.
        count: the number of chunks.
        wanted: the paths of the layers that the second chunk and those after it begin with; or
            rules, as of a device map, with numbers of chunks; or None for chunks that take about as
            long as each other.

    Raises:
        ConfigError: if the model has no graph or a stateful layer, if a chunk has no layer, would
            read what a later one makes, or if a layer that keeps a state is called in two.
    """
    graph, units = _cuttable(model)
    chunk_of, table = _chunks_of(model, units, inputs, count, wanted)
    aliases: dict[Key, Key] = {}
    calls = list(_calls(graph, (), {id(unit.operation): unit.path for unit in units}, aliases))
    numbers = _numbers(calls, chunk_of)
    made = {key: n for call, n in zip(calls, numbers, strict=True) for key in call.writes}
    _check(calls, numbers, made, count)
    outputs = tuple(_resolved(((), id(tensor)), aliases) for tensor in graph._outputs)
    chunks = _chunks(calls, numbers, made, outputs)
    keys = tuple(((), id(tensor)) for tensor in graph._inputs)
    return Cut(graph, tuple(chunks), keys, chunk_of, table)


def _chunks(
    calls: Sequence[Call], numbers: Sequence[int], made: Mapping[Key, int], outputs: tuple[Key, ...]
) -> list[Chunk]:
    """The calls of each chunk, with what it reads of others and what others read of it."""
    last = max(numbers)
    readers: dict[Key, set[int]] = {key: {last} for key in outputs}
    for call, number in zip(calls, numbers, strict=True):
        for key in call.reads:
            readers.setdefault(key, set()).add(number)
    every = [
        tuple(c for c, n in zip(calls, numbers, strict=True) if n == number)
        for number in range(last + 1)
    ]
    holder: dict[int, int] = {}  # of each layer, by `id`: the chunk of its first call
    for call, number in zip(calls, numbers, strict=True):
        holder.setdefault(id(call.layer), number)
    borrowed = [_borrowed(own, number, holder) for number, own in enumerate(every)]
    chunks = []
    for number, own in enumerate(every):
        layers = {
            id(c.layer): c.layer
            for c in own
            if c.layer is not None and holder[id(c.layer)] == number
        }
        held = {id(v) for layer in layers.values() for v in layer.variables}
        lent = {key: v for each in borrowed for key, v in each.items() if id(v) in held}
        needed = list(dict.fromkeys(key for call in own for key in call.reads))
        needed += [key for key in outputs if number == last and key not in needed]
        reads = (key for key in needed if made.get(key, -1) < number)
        writes = (k for c in own for k in c.writes if max(readers.get(k, {0})) > number)
        chunks.append(
            Chunk(
                calls=own,
                layers=tuple(layers.values()),
                reads=(*reads, *borrowed[number]),
                writes=outputs if number == last else (*writes, *lent),
                borrowed=borrowed[number],
                lent=lent,
            )
        )
    return chunks


def _cuttable(model: Model) -> tuple[Any, list[Unit]]:
    """The Functional graph of a model, and its units."""
    units = units_of(model)
    graph = graph_of(model)
    if graph is None:
        raise ConfigError(
            f"strategy='pipeline' cannot cut the model {model.name!r}, a {type(model).__name__} "
            "whose `call` is Python code. Build it with keras.Sequential or the functional API; "
            "its layers may be of any kind."
        )
    check_stateless(model)
    return graph, units


def check_stateless(model: Model) -> None:
    """Refuses layers that go on from the batch before.

    Args:
        model: the model; it need not be built.

    Raises:
        ConfigError: for the first.
    """
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise ConfigError(
                f"The layer {layer.name!r} is stateful: it goes on from the batch before, and a "
                "pipeline's microbatches have no order. Make it with stateful=False, or use "
                "strategy='single'."
            )


def _calls(
    graph: Functional, within: tuple[int, ...], paths: Mapping[int, str], aliases: dict[Key, Key]
) -> Iterator[Call]:
    for number, node in enumerate(nodes_in_order(graph)):
        reads = tuple(_resolved((within, id(t)), aliases) for t in node.input_tensors)
        inner = graph_of(node.operation)
        if inner is None:
            yield Call(
                paths[id(node.operation)], node, reads, tuple((within, id(t)) for t in node.outputs)
            )
            continue
        deeper = (*within, number)
        for tensor, key in zip(inner._inputs, reads, strict=True):
            aliases[(deeper, id(tensor))] = key
        yield from _calls(inner, deeper, paths, aliases)
        for tensor, own in zip(node.outputs, inner._outputs, strict=True):
            aliases[(within, id(tensor))] = _resolved((deeper, id(own)), aliases)


def _resolved(key: Key, aliases: Mapping[Key, Key]) -> Key:
    while key in aliases:
        key = aliases[key]
    return key


# A layer that several chunks call: the first of them holds its variables. The others read its
# weights as they read tensors, and give back their gradients, so that each weight has one update.


def _numbers(calls: Sequence[Call], chunk_of: Mapping[str, int]) -> list[int]:
    """The chunk of each call: that of its layer, or a later one whose tensors it reads."""
    numbers: list[int] = []
    made: dict[Key, int] = {}
    met: set[str] = set()
    for call in calls:
        number = chunk_of[call.path]
        if call.path in met and not _state_of(call.layer):
            number = max([number, *(made[key] for key in call.reads if key in made)])
        met.add(call.path)
        made.update(dict.fromkeys(call.writes, number))
        numbers.append(number)
    return numbers


def _state_of(layer: Layer | None) -> list[KerasVariable]:
    """A layer's variables besides its weights, such as moving means and random numbers."""
    if layer is None:
        return []
    weights = {id(v) for each in layer._flatten_layers() for v in each._trainable_variables}
    every = (*layer.variables, *layer.metrics_variables)
    return [variable for variable in every if id(variable) not in weights]


def _borrowed(
    own: Sequence[Call], number: int, holder: Mapping[int, int]
) -> dict[Key, KerasVariable]:
    """The weights of other chunks' layers that a chunk reads, by the keys that stand for them."""
    others = [call for call in own if call.layer is not None and holder[id(call.layer)] != number]
    return {((), id(variable)): variable for call in others for variable in _read_by(call)}


def _read_by(call: Call) -> list[KerasVariable]:
    """The variables that a call of a layer reads: one that it does not has no gradient from it."""
    assert call.layer is not None
    variables, symbols = call.layer.variables, call.node.input_tensors

    def run(values: list[Any], inputs: list[Any]) -> Structure:
        by_symbol = {id(symbol): each for symbol, each in zip(symbols, inputs, strict=True)}
        args, kwargs = call.node.arguments.fill_in(by_symbol)
        with Assigning(list(zip(variables, values, strict=True))):
            return call.node.operation(*args, **kwargs)

    specs = [[tf.TensorSpec(each.shape, each.dtype) for each in of] for of in (variables, symbols)]
    graph = tf.function(run, autograph=False).get_concrete_function(*specs).graph
    pairs = zip(variables, graph.inputs, strict=False)
    return [variable for variable, value in pairs if value.consumers()]


def _check(
    calls: Sequence[Call], numbers: Sequence[int], made: Mapping[Key, int], count: int
) -> None:
    empty = sorted(set(range(count)) - set(numbers))
    if empty:
        paths = len({call.path for call in calls})
        raise ConfigError(
            f"{count} stages are more than the model can be cut into: it has {paths} layers, and "
            f"none would be left for stage {empty[0]}. Give fewer stages."
        )
    times = collections.Counter(call.path for call in calls)
    for call, number in zip(calls, numbers, strict=True):
        late = max((made[key] for key in call.reads if key in made), default=0)
        if late > number and times[call.path] > 1:
            state = ", ".join(repr(variable.name) for variable in _state_of(call.layer))
            raise ConfigError(
                f"The layer {call.path!r} is called {times[call.path]} times, and keeps {state} in "
                f"stage {number}, but one call reads what stage {late} makes. Put all that is "
                "between its calls into one stage, or use a layer for each call."
            )
        if late > number:
            raise ConfigError(
                f"The layer {call.path!r} of stage {number} reads what stage {late} makes. Stages "
                "follow the order of the model: move it to a later one."
            )


# The assignment of layers to the chunks of a pipeline.


def _chunks_of(
    model: Model,
    units: Sequence[Unit],
    inputs: Structure,
    count: int,
    wanted: Sequence[str] | Mapping[str, int] | None,
) -> tuple[dict[str, int], str]:
    """The chunk of each unit by path, and a table of the plan if there was one."""
    paths = [unit.path for unit in units]
    layers = [unit.path for unit in units if unit.is_layer]
    if count > len(layers):
        raise ConfigError(
            f"{count} stages are more than the model has layers to share out: {len(layers)} "
            f"({', '.join(layers)}). Give at most {len(layers)} stages."
        )
    if isinstance(wanted, Mapping):
        named = devices_of(list(units), {rule: str(chunk) for rule, chunk in wanted.items()})
        return {path: int(chunk) for path, chunk in named.items()}, ""
    if wanted is not None:
        return _beginning(paths, wanted, count), ""
    costs = costs_of(model, inputs)
    # Every chunk has a layer: each begins with another one.
    cuts = split(costs, [float("inf")] * count, filled=True)
    assert cuts is not None
    result = {
        costs[i].path: number for number, (begin, end) in enumerate(cuts) for i in range(begin, end)
    }
    plan = Plan(devices={path: f"stage {number}" for path, number in result.items()}, costs=costs)
    return result, plan.table()


def _beginning(paths: Sequence[str], wanted: Sequence[str], count: int) -> dict[str, int]:
    shown = f"cuts={','.join(wanted)!r}"
    if len(wanted) != count - 1:
        raise ConfigError(
            f"{shown}: {count} stages need {count - 1} names, of the first layer of each stage but "
            f"the first, and it has {len(wanted)}."
        )
    starts = []
    for name in wanted:
        if name not in paths:
            raise ConfigError(
                f"{shown}: there is no layer {name!r} for a stage to begin with. "
                f"There are: {', '.join(paths)}."
            )
        starts.append(paths.index(name))
    if starts != sorted(starts) or 0 in starts:
        raise ConfigError(
            f"{shown}: the stages' first layers are not in the order of the model: "
            f"{', '.join(paths)}."
        )
    return {path: sum(start <= i for start in starts) for i, path in enumerate(paths)}
