"""What is broken on purpose, and which tests should notice."""

from __future__ import annotations

import dataclasses

__all__ = ["MUTANTS", "Mutant"]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake in one place.

    Attributes:
        path: the file.
        text: what stands there, once in the file.
        instead: what the mutant has in its place.
        tests: arguments of pytest: the tests that should fail.
    """

    path: str
    text: str
    instead: str
    tests: str

    @property
    def name(self) -> str:
        """The mutant in a line."""
        words = " ".join(self.text.split())
        return f"{self.path}: {words[:60]} -> {' '.join(self.instead.split())[:50] or 'nothing'}"


_WIRING = "tests/unit/test_wiring.py"
_SERVERS = "tests/unit/test_servers.py"
_HALVES = "tests/unit/test_compression.py"
_SCHEDULES = "tests/unit/test_schedules.py"
_PLACES = "tests/estimator/test_planning.py"
_STEPS = "tests/contract/test_steps.py --tier=everything -k '{}'"
_SPEC = "tests/cluster/test_spec.py"
_JOIN = "tests/cluster/test_join.py"
_ELASTIC = "tests/cluster/test_elastic.py"
_SUPERVISE = "tests/cluster/test_supervise.py"
_ESTIMATORS = "tests/estimator/test_estimator.py"
_PIPELINES = "tests/pipelines/test_pipelines.py -k equals_the_whole_model"
_TRAINING = "tests/contract/test_training.py tests/contract/test_batches.py -k multi_worker"
_LOSSES = "tests/contract/test_losses.py --tier=everything -k 'mirrored and ({})'"
_ADDED = "tests/contract/test_losses.py --tier=everything -k 'pipeline and layers_add'"
_REDUCED = _LOSSES.format("reductions or mask or reduces_the_batch")
_READ_WEIGHTS = _LOSSES.format("reads_weights")
_PARTS = "tests/keras/test_mesh.py -k 'mesh-transformer or one_sum'"
_MEET = _LOSSES.format("meet and ({})")
_CHOSEN = "tests/contract/test_chosen.py --tier=everything -k mirrored"
_GRADIENTS = "tests/contract/test_gradients.py --tier=everything -k mirrored"
_CONTROL_FLOW = "tests/keras/test_zero.py -k 'zero3 and within_control_flow'"


def _of(path: str, tests: str, *pairs: tuple[str, str]) -> list[Mutant]:
    return [Mutant(path, text, instead, tests) for text, instead in pairs]


MUTANTS: list[Mutant] = [
    # Options on their way to what uses them.
    *_of(
        "tfdist/config/gradient_options.py",
        _WIRING,
        ('return self.on_stale == "damp"', "return False"),
        ("round(self.bucket_mb * 2**20)", "round(self.bucket_mb * 2**10)"),
        ("1 if self.staleness is None else self.staleness", "1"),
    ),
    *_of(
        "tfdist/strategies/pipeline/strategy.py",
        _WIRING,
        ("recompute=own.recompute,", ""),
        ("vertical_sync=own.vertical_sync,", ""),
        ("virtual=own.virtual,", ""),
        ("timeout=own.stage_timeout,", ""),
        ("timeline=own.timeline,", ""),
    ),
    *_of(
        "tfdist/strategies/parameter_server/strategy.py",
        _WIRING,
        ("config.part(ServerOptions)", "ServerOptions()"),
    ),
    *_of(
        "tfdist/strategies/horovod/strategy.py",
        _WIRING,
        ("groups=own.groups or 1", "groups=1"),
        (
            "rendezvous.prepare(config, cluster",
            "rendezvous.prepare(StrategyConfig.of(strategy='horovod'), cluster",
        ),
    ),
    *_of(
        "tfdist/strategies/multi_worker/strategy.py",
        _WIRING,
        ("config.part(CollectiveOptions).communication)", '"auto")'),
        ("                len(devices),\n", "                1,\n"),
    ),
    *_of(
        "tfdist/strategies/connection.py",
        _WIRING,
        ("seconds = config.start_timeout", "seconds = 60.0"),
    ),
    *_of(
        "tfdist/config/horovod_options.py",
        _WIRING,
        ("int(options.fusion_mb * 2**20)", "int(options.fusion_mb)"),
        ('environ["HOROVOD_AUTOTUNE"] = "1"', "pass"),
        ('environ["HOROVOD_TIMELINE"] = options.timeline', "pass"),
        ("environ.update(_stall(options.stall_timeout))", "pass"),
    ),
    *_of(
        "tfdist/strategies/factory.py",
        _WIRING,
        ("    made.config = config\n", ""),
        ("**_counts(name), **options}", "**_counts(name)}"),
    ),
    *_of(
        "tfdist/cli/options.py",
        _WIRING,
        ("flags = list(option.flags)", 'flags = [f"--{option.name}"]'),
        ("in all_options().items()}", 'in all_options().items() if name != "outer_lr"}'),
    ),
    Mutant("tfdist/cli/planning.py", "config=config.to_json(),", 'config="{}",', _WIRING),
    # Servers: placement, staleness, numbers.
    *_of(
        "tfdist/strategies/parameter_server/servers.py",
        _SERVERS,
        ("return min(choices, key=self.bytes_on)", "return max(choices, key=self.bytes_on)"),
        ("size // self._min_shard_bytes, shape[0]", "size // self._min_shard_bytes"),
        ("servers if max_shards is None else max_shards", "servers"),
    ),
    *_of(
        "tfdist/strategies/parameter_server/passes.py",
        "tests/unit/test_reading.py",
        ("bisect.bisect(kept", "bisect.bisect_left(kept"),
        ("kept.pop(before - 1)", "kept.pop(0)"),
    ),
    *_of(
        "tfdist/strategies/horovod/strategy.py",
        "tests/keras/test_mesh.py --tier=everything -k horovod_mesh-recurrent",
        (
            "self._gradients(self.extended.rings[DATA], values)",
            "self._gradients(self._ring, values)",
        ),
        ("return RingLink(self.extended.rings[axis])", "return RingLink(self._ring)"),
    ),
    *_of(
        "tfdist/strategies/parameter_server/scheduler.py",
        _SERVERS,
        ("<= self._bound", "< self._bound"),
        ("self._overlapping[other] += updates", "self._overlapping[other] += 1"),
        ("        if step in self._overlapping:\n            return\n", ""),
        ("self._updates.pop(step, None)", "pass"),
        ('rule.mode == "stale" and rule.on_stale == "wait"', 'rule.mode == "stale"'),
    ),
    # Compressions.
    *_of(
        "tfdist/gradients/compression/half_precision.py",
        _HALVES,
        ("tf.where(scales == 0, scales, 1 / scales)", "scales"),
        ("_LARGEST = 32768.0", "_LARGEST = 131072.0"),
        ("return tf.reduce_max(tf.abs(value))", "return tf.reduce_max(value)"),
        (
            "tf.reduce_sum(tf.cast(received, tf.float32), 0)",
            "tf.reduce_mean(tf.cast(received, tf.float32), 0)",
        ),
    ),
    *_of(
        "tfdist/gradients/compression/int8.py",
        _HALVES,
        ("_LARGEST = 127", "_LARGEST = 63"),
        ("left = corrected - decoded(sent, layout.dtype)", "left = 0 * corrected"),
        ("rounded = tf.round(blocks", "rounded = tf.floor(blocks"),
        (
            "left = tf.tensor_scatter_nd_add(left, [[link.index]], left_of_own[None])",
            "del left_of_own",
        ),
    ),
    # Schedules.
    *_of(
        "tfdist/strategies/pipeline/schedules.py",
        _SCHEDULES,
        ("_order(chunks[::-1], microbatches, stages)", "_order(chunks, microbatches, stages)"),
        ("return steps + self.drain() if self._flush else steps", "return steps"),
        ("self._live += 1", "self._live += 2"),
        ("Step(Kind.BACKWARD, batch, number, chunk + 1), forward]", "forward]"),
        ("in program), initial=0)", "in program if step.kind is Kind.FORWARD), initial=0)"),
        ("return (stages - 1) / (rows + stages - 1)", "return (stages - 1) / (rows + stages)"),
        ("0.0 if box.device == device else transfer", "0.0"),
    ),
    # A pipeline's passes.
    Mutant(
        "tfdist/strategies/pipeline/engine.py",
        "recompute=recompute and not is_last",
        "recompute=False",
        _PIPELINES,
    ),
    # Clusters: no TensorFlow.
    *_of(
        "tfdist/cluster/spec.py",
        _SPEC,
        ('if task.type in ("chief", "worker"))', 'if task.type in ("worker", "chief", "ps"))'),
        ("return self.computing[0]", "return self.computing[-1]"),
        ("if task.index not in indices[position : position + 1]:", "if False:"),
        ('if task.type != "evaluator" or "evaluator" in self.addresses:', "if False:"),
    ),
    *_of(
        "tfdist/cluster/resources.py",
        "tests/cluster/test_threads.py",
        ("workers + 2", "workers"),
        ('task_type == "ps"', 'task_type == "worker"'),
    ),
    *_of(
        "tfdist/cluster/spec.py",
        "tests/unit/test_horovod.py tests/cluster",
        ("on_local[local] += 1", "pass"),
        (
            "numbered.append((seen[host], counts[host]))",
            "numbered.append((seen[host], len(hosts)))",
        ),
    ),
    *_of(
        "tfdist/launcher/elastic_directory.py",
        f"{_ELASTIC} tests/keras/test_elastic.py -k 'states or position'",
        ("return max(self._states(), default=None)", "return min(self._states(), default=None)"),
        ("{position.epoch:08d}", "{position.step:08d}"),
        ("[:-_KEPT]", "[_KEPT:]"),
    ),
    *_of(
        "tfdist/launcher/guard.py",
        f"{_SUPERVISE} -k nothing_is_left",
        ("watch(int(pipe))", "pass"),
    ),
    # The place of an Estimator's task.
    *_of(
        "tfdist/estimator/task_config.py",
        _PLACES,
        ("        _check_alone(content)\n", ""),
        ("< 2:", "< 1:"),
        ('{"chief": "master"} if "master" in content.get("cluster", {}) else {}', "{}"),
        ('        if kind != "evaluator"\n', ""),
        (
            '_NUMBERED = ("chief", "master", "worker", "ps")',
            '_NUMBERED = ("worker", "chief", "ps")',
        ),
        ("if model_dir is not None and not (isinstance", "if False and not (isinstance"),
        ("if service is not None and not isinstance", "if False and not isinstance"),
        ("        if content.get(key):", "        if False:"),
    ),
    # Estimators on replicas.
    *_of(
        "tfdist/_tf/sessions.py",
        f"{_ESTIMATORS} -k 'sparse or replicas_evaluate'",
        ("self.OTHER_GROUPS * self._graph_count", "0"),
        ("self.RUN_KEYS * _number_of_run(graph)", "0 * _number_of_run(graph)"),
    ),
    Mutant(
        "tfdist/estimator/distribution.py",
        "tf.where(present, spec.loss, 0.0)",
        "spec.loss",
        f"{_ESTIMATORS} -k 'replicas_evaluate or two_devices'",
    ),
    # The exchange of gradients.
    *_of(
        "tfdist/comm/batch_sharding.py",
        _TRAINING,
        ("position * small + min(position, extra)", "position * small"),
        (
            "return start, start + small + tf.cast(position < extra, start.dtype)",
            "return start, start + small",
        ),
    ),
    # Losses, which several replicas compute as one does.
    *_of(
        "tfdist/keras/losses.py",
        _REDUCED,
        ("loss = loss * _correction(step, denominator)", "pass"),
        ("step.note_mean(_divide(loss, step.share(loss.dtype)))", "step.note_mean(loss)"),
        ("denominator = tf.stop_gradient(denominator) * step.present(denominator.dtype)", "pass"),
        ("values = as_average(step, values) if whole else values", "pass"),
    ),
    *_of(
        "tfdist/keras/metric_updates.py",
        _STEPS.format("own_train_step and mirrored"),
        (
            "sample_weight = weight * step.share(self.dtype) * step.replicas",
            "sample_weight = None",
        ),
    ),
    *_of(
        "tfdist/keras/metric_updates.py",
        "tests/contract/test_metrics.py -k 'test_metrics and mirrored' --tier=everything",
        ("return step.weigh(term)", "return term"),
        ("if _counts_examples(step, variable, term) else step.added_once(term)", ""),
        ("again = with_whole_statistics(step, term)", "again = term"),
    ),
    *_of(
        "tfdist/keras/assignments.py",
        "tests/contract/test_statistics.py -k 'running and multi_worker' --tier=everything",
        ("value if of_keras else with_whole_statistics(step, value)", "value"),
    ),
    *_of(
        "tfdist/keras/reductions.py",
        _REDUCED,
        ("is_sum=divided == 0)", "is_sum=False)"),
        ("return times[0] + 1.0", "return 0.0"),
        ("return not own[1]", "return True"),
    ),
    *_of(
        "tfdist/keras/reductions.py",
        _READ_WEIGHTS,
        ("found.shared.append(tensor)", "pass"),
    ),
    *_of(
        "tfdist/keras/whole_batch.py",
        _READ_WEIGHTS,
        ("parts.append((tensor, factor))", "pass"),
        ("factor if scale is None else factor * scale", "factor"),
        ("else tf.math.multiply_no_nan(leaf.tensor, scale)", "else leaf.tensor"),
    ),
    *_of(
        "tfdist/keras/whole_batch.py",
        "tests/contract/test_statistics.py --tier=everything -k 'mirrored and gives and inputs'",
        (
            "known = _known_beside_means(step)\n    given",
            "return\n    given",
        ),
    ),
    *_of(
        "tfdist/keras/example_pairs.py",
        "tests/unit/test_dependence.py",
        ("known, _carried(inner, graph, known) if loops else known", "known, known"),
        ("return _ends_by_examples(condition, ", "return False and _ends_by_examples(condition, "),
        ('_flags_behind(op.inputs[0]) if op.type in ("All", "Any")', "[op.inputs[0]] if True"),
        ("result.dtype != tf.variant and _is_of_items", "False and _is_of_items"),
    ),
    *_of(
        "tfdist/keras/losses.py",
        "tests/contract/test_statistics.py --tier=everything -k 'mirrored and activit'",
        ("whole / (size * step.replicas)", "whole / size"),
        ("            note_meeting(step, value)", "            pass"),
    ),
    *_of(
        "tfdist/keras/whole_statistics.py",
        "tests/contract/test_statistics.py tests/contract/test_metrics.py --tier=everything "
        "-k 'mirrored and (logs or metrics)'",
        ("        value = with_whole_statistics(step, value)\n", "        pass\n"),
    ),
    *_of(
        "tfdist/keras/metric_updates.py",
        "tests/contract/test_statistics.py --tier=everything -k 'mirrored and of_a_'",
        (
            "    again = with_whole_statistics(step, value)\n    check",
            "    again = value\n    check",
        ),
        ("    check_given(step, again)", "    pass"),
        ("        return tf.cast(value, metric.dtype)", "        return value"),
    ),
    *_of(
        "tfdist/keras/gradient_functions.py",
        "tests/contract/test_losses.py --tier=everything "
        "-k '(gradient_functions or program_changes) and mirrored'",
        ("is_weighed else tf.nest.map_structure(step.weigh, gradients)", "True else []"),
        ("is_weighed else tf.nest.map_structure(step.unweigh, taken)", "True else []"),
        ("statistics=True, counts=True", "statistics=True"),
        ("elif not reduction_of(each, depends, sums).linear:", "elif False:"),
    ),
    *_of(
        "tfdist/keras/optimizers.py",
        "tests/contract/test_losses.py --tier=everything "
        "-k '(by_hand_and_scales and mirrored) or that_is_scaled'",
        ("as_average(step, loss)", "loss"),
        ("            note_meeting(step, loss)", "            pass"),
    ),
    *_of(
        "tfdist/strategies/parameter_server/optimizers.py",
        "tests/contract/test_losses.py --tier=everything -k 'parameter_server and float8'",
        ("    if overwritten_in(variables) is not None:", "    if False:"),
        ("                part.overwrite_with_gradient = True", "                pass"),
    ),
    *_of(
        "tfdist/keras/replica_step.py",
        "tests/contract/test_statistics.py --tier=everything -k 'mirrored and predictions'",
        ("        check_given(step, outputs, PREDICTED)", "        pass"),
    ),
    *_of(
        "tfdist/keras/losses.py",
        "tests/contract/test_statistics.py --tier=everything -k 'mirrored and gives and inputs'",
        ("            check_given(step, (args, kwargs))", "            pass"),
    ),
    *_of(
        "tfdist/keras/gathered_loss.py",
        "tests/contract/test_statistics.py --tier=everything -k 'mirrored and gives and labels'",
        ("        check_given(step, (y_true, y_pred, sample_weight))", "        pass"),
    ),
    *_of(
        "tfdist/keras/optimizers.py",
        "tests/contract/test_steps.py --tier=everything -k 'mirrored and lookups_clipped'",
        ("tf.nest.flatten(shared, expand_composites=True)", "[]"),
    ),
    *_of(
        "tfdist/keras/whole_batch.py",
        _MEET.format("variance-True or contrast-True"),
        ("key: Examples(ROWS, orders.get(key, False))", "key: Examples()"),
        (
            "        step.note_meeting(found)\n\n\ndef _outputs",
            "        pass\n\n\ndef _outputs",
        ),
    ),
    *_of(
        "tfdist/keras/whole_batch.py",
        "tests/contract/test_losses.py -k 'a_step_mixes and faded and mirrored'",
        ("every = (step.known, step.known | _outputs(step))", "every = (step.known,)"),
    ),
    Mutant(
        "tfdist/keras/whole_batch.py",
        "known, statistics=True)\n    if",
        "known, statistics=True, places=False)\n    if",
        "tests/fuzz/test_fuzz.py --tier=everything -k weighed_by_place_after",
    ),
    *_of(
        "tfdist/keras/losses.py",
        _LOSSES.format("mixes"),
        ("check_places(step, tf.nest.flatten(value))", "pass"),
    ),
    *_of(
        "tfdist/keras/gathered_loss.py",
        _LOSSES.format("mixes"),
        ("itertools.chain(examples, *map(_logits_behind, examples))", "examples"),
        ('getattr(probabilities, "_keras_logits", None)', "None"),
    ),
    *_of(
        "tfdist/keras/optimizers.py",
        "tests/contract/test_updates.py --tier=everything -k 'mirrored and compute_with'",
        ("is_whole and updater.rule.is_exact", "False"),
    ),
    *_of(
        "tfdist/keras/gathered_loss.py",
        _MEET.format("circle or contrast or hidden or labels or another or condition"),
        ("masks.append(tf.gather(whole._keras_mask, rows))", "pass"),
        ("own = start + tf.range", "own = tf.range"),
        ("with entered(None), on_whole_batch.up():", "with entered(step):"),
        ("with entered(None), on_whole_batch.up():", "with entered(None):"),
        ("where = next(iter(", "next(iter("),
        ("return step.note_mean(whole), mask", "return values, mask"),
    ),
    *_of(
        "tfdist/keras/gathered_loss.py",
        _LOSSES.format("all_replicas"),
        (" | step.known", ""),
    ),
    *_of(
        "tfdist/keras/losses.py",
        "tests/contract/test_steps.py -k 'of_graph and multi_worker' --tier=everything",
        ("        *on_gradients(_of_whole_batch, priority=1),\n", ""),
    ),
    *_of(
        "tfdist/keras/batch_axes.py",
        "tests/contract/test_losses.py -k 'reduces_by_hand and correlated and mirrored' "
        "--tier=everything",
        ("return None if _is_of_statistics(op, depends) else 0", "return 0"),
    ),
    *_of(
        "tfdist/keras/reductions.py",
        "tests/unit/test_dependence.py",
        ("    if part is not None:  # gathered", "    if False:  # gathered"),
    ),
    *_of(
        "tfdist/strategies/pipeline/train_function.py",
        "tests/contract/test_gradients.py -k 'change_gradients_themselves and pipeline' "
        "--tier=everything",
        ("apply_gradients(zip(grads, weights, strict=True))", "apply(grads, weights)"),
    ),
    *_of(
        "tfdist/keras/example_order.py",
        "tests/unit/test_dependence.py",
        ("return start == 0 and delta == 1 and self._is_length(op.inputs[1])", "return True"),
        ("            op = op.inputs[int(is_choice)].op", "            op = op.inputs[0].op"),
    ),
    *_of(
        "tfdist/keras/sharded_weights.py",
        "tests/contract/test_steps.py -k 'of_graph and zero3' --tier=everything",
        ("        sources = tf.nest.map_structure(variable_of, sources)\n", ""),
    ),
    *_of(
        "tfdist/strategies/parameter_server/step_function.py",
        "tests/contract/test_steps.py -k 'seeds_goes_on and parameter_server' --tier=everything",
        ("            if not self._is_in_order(traced):\n", "            if True:\n"),
        ("        self._numbers.note_draws(traced)\n        if parts", "        if parts"),
        ("self._numbers.note_draws(parts[0][1])", "del parts"),
    ),
    *_of(
        "tfdist/strategies/parameter_server/tracing.py",
        "tests/servers/test_servers.py -k take_part_in_ordinary",
        ("part.note_held(box, Examples())", "pass"),
    ),
    *_of(
        "tfdist/keras/replica_context.py",
        "tests/servers/test_servers.py -k take_part_in_ordinary",
        ("self.note_held(leaf, Examples(ROWS))", "pass"),
    ),
    *_of(
        "tfdist/keras/replica_context.py",
        _MEET.format("circle or contrast"),
        ("size = tf.shape(rows[0])[0] * self.present(tf.int32)", "size = tf.shape(rows[0])[0]"),
        ("tf.cumsum(sizes, exclusive=True)", "tf.cumsum(sizes)"),
    ),
    *_of(
        "tfdist/keras/example_pairs.py",
        _MEET.format("share or variance or largest"),
        ("return bool(own) and from_reduced and mixes", "return False"),
        ("any(id(x) in self._reduced for x in values_of(op))", "False"),
    ),
    *_of(
        "tfdist/strategies/pipeline/stage.py",
        _ADDED,
        (
            "if not self._is_open and (scope.losses or self._of_program & {*scope.assigned}):",
            "if False:",
        ),
        ("Dependence([*weights, *state, *(value for _, value in borrowed)])", "Dependence()"),
        ("as_average(step, tf.reduce_sum(term))", "tf.reduce_sum(term)"),
    ),
    *_of(
        "tfdist/keras/replica_context.py",
        _STEPS.format("own_train_step and mirrored"),
        ("{**self.means, **self.gradients}", "self.means"),
    ),
    *_of(
        "tfdist/keras/batch_axes.py",
        _CHOSEN,
        ("if each.op.type in _BY_VALUE or id(each) in depends.chosen:", "if False:"),
    ),
    *_of(
        "tfdist/keras/batch_axes.py",
        "tests/contract/test_losses.py --tier=everything -k 'neither_means'",
        ("if op.type in REDUCING | CHOOSING:", "if op.type in REDUCING:"),
    ),
    *_of(
        "tfdist/keras/batch_axes.py",
        _STEPS.format("own_train_step and mirrored"),
        ("id(tensor) in depends.reduced or not depends(tensor)", "not depends(tensor)"),
    ),
    *_of(
        "tfdist/_tf/graphs.py",
        _STEPS.format("checked_updates and mirrored"),
        ("            manager.run_independently(op)", "            pass"),
    ),
    *_of(
        "tfdist/strategies/parameter_server/remote_step.py",
        _STEPS.format("kernels and parameter_server"),
        ("= tf.stop_gradient(value)", "= value"),
    ),
    *_of(
        "tfdist/strategies/parameter_server/apply_update.py",
        _STEPS.format("kernels and parameter_server"),
        ("piece.variable, piece.assigned", "piece.variable, False"),
    ),
    *_of(
        "tfdist/strategies/parameter_server/apply_update.py",
        "tests/servers/test_workers.py -k notes_its_changes",
        (
            "with tf.control_dependencies(of_server(ops, device)):\n                noted +=",
            "with tf.control_dependencies(ops):\n                noted +=",
        ),
    ),
    # Gradients of halves, and loss scales.
    *_of(
        "tfdist/strategies/parameter_server/apply_update.py",
        "tests/servers/test_scaling.py -k 'one_process and parameter_server'",
        ("as_of_halves(total) if self._piece.of_halves else total", "total"),
        (
            "part.weigh(value) if change.assigned else part.weigh_gradient(value, optimizer)",
            "part.weigh(value)",
        ),
    ),
    Mutant(
        "tfdist/keras/optimizers.py",
        "as_of_halves(total) if is_of_halves(g) else total",
        "total",
        "tests/servers/test_scaling.py -k 'one_process and multi_worker'",
    ),
    Mutant(
        "tfdist/keras/zero.py",
        "result.update((i, as_of_halves(result[i])) for i in halves)",
        "",
        "tests/servers/test_scaling.py --tier=everything -k 'one_process and zero and not zero3'",
    ),
    Mutant(
        "tfdist/sharding/gathering.py",
        "return as_of_halves(total) if is_of_halves(upstream) else total",
        "return total",
        "tests/servers/test_scaling.py --tier=everything -k 'one_process and zero3'",
    ),
    Mutant(
        "tfdist/strategies/pipeline/stage_graph.py",
        "self._job.sums.of_halves.add(number)",
        "pass",
        "tests/servers/test_scaling.py --tier=everything -k 'one_process and pipeline'",
    ),
    # Losses and metrics by feature, output gradients, and changes in place.
    *_of(
        "tfdist/keras/losses.py",
        _LOSSES.format("number_for_each_feature and sum_over_batch_size"),
        ("if is_by_feature(values, step.depends, step.averages()):", "if False:"),
    ),
    *_of(
        "tfdist/keras/gathered_loss.py",
        _LOSSES.format("number_for_each_feature and sum_over_batch_size"),
        (
            "or is_by_feature(values, step.depends, step.averages()):",
            ":",
        ),
    ),
    *_of(
        "tfdist/keras/metric_updates.py",
        _LOSSES.format("number_for_each_feature and sum_over_batch_size"),
        ("values = tf.reduce_mean(values)  # Each batch", "pass  # Each batch"),
    ),
    *_of(
        "tfdist/keras/losses.py",
        _LOSSES.format("output_gradients or computed_again"),
        ("(target, by * factor) if of is total", "(target, factor) if of is total"),
        ("within_gradients.is_up and output_gradients is not None", "False"),
    ),
    *_of(
        "tfdist/keras/plain_variables.py",
        _LOSSES.format("in_place"),
        (
            "(values, indices), _ = step.gather(rows, place_of(slices.indices.op))",
            "values, indices = rows",
        ),
        ("        value = _of_one_device(step, variable.name, value)\n", ""),
    ),
    Mutant(
        "tfdist/keras/weights.py",
        "dtype.is_floating or dtype.is_integer or dtype.is_bool",
        "dtype.is_floating or dtype.is_integer",
        _LOSSES.format("booleans"),
    ),
    Mutant(
        "tfdist/comm/batch_dependence.py",
        '("Sum", "Mean", "SqrtN")), 1),',
        '("Sum", "Mean", "SqrtN")), 0),',
        "tests/unit/test_dependence.py -k segments",
    ),
    Mutant(
        "tfdist/strategies/pipeline/loss.py",
        "return as_average(step, loss)",
        "return loss",
        "tests/contract/test_losses.py --tier=everything -k 'call_of_its_own and pipeline'",
    ),
    # Hooks go in all together or not at all.
    *_of(
        "tfdist/keras/hooks.py",
        "tests/keras/test_hooks.py",
        (
            "                    self._restore()\n                    raise",
            "                    raise",
        ),
        (
            "self._set(wanted)\n        self.hooks = wanted",
            "self.hooks = wanted\n        self._set(wanted)",
        ),
    ),
    # Examples that are chosen, and gradients that are more than applied.
    *_of(
        "tfdist/keras/reductions.py",
        _CHOSEN,
        ("leaf.is_sum or bool(leaf.chosen) or leaf.is_drawn", "leaf.is_sum or leaf.is_drawn"),
    ),
    *_of(
        "tfdist/keras/normalization.py",
        _CHOSEN,
        ("if step is None or mask is None or not self.synchronized:", "if True:"),
    ),
    *_of(
        "tfdist/keras/building.py",
        _GRADIENTS,
        (" or any(map(_has_own_apply, optimizers_of(model)))", ""),
    ),
    # Updates that come twice, and trainings that were interrupted.
    *_of(
        "tfdist/strategies/parameter_server/scheduler.py",
        "tests/unit/test_dispatch.py",
        (
            "            self.gate.end(self._waiting.popleft().number)",
            "            self._waiting.popleft()",
        ),
        ("self.gate.end(self._running.pop(index).number)", "self._running.pop(index)"),
    ),
    *_of(
        "tfdist/strategies/parameter_server/transaction_log.py",
        f"{_SERVERS} -k ledger",
        ("late = there > number", "late = there > number + WINDOW"),
        ("late = tf.logical_or(late, tf.less(number, self._floor))", "pass"),
    ),
    Mutant(
        "tfdist/strategies/parameter_server/optimizers.py",
        "factor = tf.convert_to_tensor(optimizer.dynamic_scale) / scale",
        "factor = tf.ones([])",
        "tests/servers/test_scaling.py -k grows_after",
    ),
    # Replicas on threads, and logs that are no numbers.
    *_of(
        "tfdist/keras/replica_attributes.py",
        "tests/keras/test_replica_attributes.py",
        ("        self._restore(kept)", "        pass"),
        ("        self._restore(self._before)", "        pass"),
        ("            now[name] = old.value", "            pass"),
        ("            self._check(turn.graph, turn.number)", "            pass"),
    ),
    *_of(
        "tfdist/strategies/base.py",
        _LOSSES.replace("mirrored", "multi_worker").format("vectors"),
        ("if axis is not None and is_agreed(value):", "if False:"),
    ),
    *_of(
        "tfdist/strategies/pipeline/stage_graph.py",
        _LOSSES.replace("mirrored", "pipeline").format("vectors"),
        ("None if leaf is None else leaf.dtype for leaf in leaves[fixed:]", ""),
    ),
    # Layers in parts, along the model axis of a mesh.
    *_of(
        "tfdist/sharding/relayout.py",
        _PARTS,
        ("lambda upstream: summed(", "lambda upstream: copied("),
    ),
    Mutant(
        "tfdist/sharding/relayout.py",
        "return part_of(link, tf.convert_to_tensor(upstream), part.dimension)",
        "return upstream",
        "tests/keras/test_mesh.py --tier=everything -k mesh_zero3-network",
    ),
    Mutant(
        "tfdist/sharding/relayout.py",
        "order = [*range(1, dimension + 1), 0, *range(dimension + 1, rank + 1)]",
        "order = [*range(rank + 1)]",
        _PARTS,
    ),
    *_of(
        "tfdist/keras/sharded_weights.py",
        "tests/keras/test_mesh.py -k outputs",
        ("        _refuse_parts(sources)\n        _refuse_outside", "        _refuse_outside"),
        ("part_behind(strategy.link(MODEL), each) is not None", "False"),
    ),
    *_of(
        "tfdist/keras/sharded_weights.py",
        "tests/keras/test_zero.py -k outside_of_steps",
        ("        _refuse_outside_of_replica(sources)\n", ""),
    ),
    *_of(
        "tfdist/sharding/variables.py",
        "tests/keras/test_zero.py -k outside_of_steps",
        ("at_call(id(self), self._read_at_call, spec)", "self._read_now()"),
        ("if not (self._in_replica or tf.executing_eagerly()):", "if False:"),
        ("if made_for_dataset():", "if False:"),
    ),
    # Shards of variables: their exchange, their gathering, and files of them.
    *_of(
        "tfdist/sharding/exchange.py",
        "tests/unit/test_sharding.py",
        ("value = tf.transpose(tf.reshape(value, [before, shards, after]), [1, 0, 2])", "pass"),
        ("(value.indices < cut.stop)", "(value.indices <= cut.stop)"),
    ),
    *_of(
        "tfdist/sharding/gathering.py",
        _CONTROL_FLOW,
        ("weighed = weigh(upstream)", "weighed = upstream"),
    ),
    Mutant(
        "tfdist/sharding/gathering.py",
        "redirect(reading.readers, use.whole, again)",
        "pass",
        "tests/unit/test_sharding.py -k gathered_again",
    ),
    *_of(
        "tfdist/comm/launchers.py",
        "tests/keras/test_zero.py --tier=everything -k mesh-within_control_flow",
        ("return None if gradients_of_control_flow() else token", "return token"),
        ("key = graph.capture(key)", "pass"),
    ),
    *_of(
        "tfdist/sharding/checkpoint.py",
        "tests/unit/test_checkpoint.py",
        ("        if actual != size:", "        if actual is None:"),
        ("if save != self.index.save:", "if False:"),
        ('match["save"] != index.save', "False"),
    ),
    *_of(
        "tfdist/sharding/deferred.py",
        _PARTS,
        ("function.exchanges.items() if op in needed", "function.exchanges.items()"),
    ),
    *_of(
        "tfdist/keras/tensor_parallel.py",
        _PARTS,
        ("ids < cut.stop", "ids <= cut.stop"),
        ("own = part.value * _own_part(kept, part.value, part.dimension)", "own = part.value"),
        ("with _within.set(1):", "with _within.set(None):"),
    ),
    *_of(
        "tfdist/keras/layouts.py",
        _PARTS,
        ("_columns_of(_called.value[1]) == equation.of_inputs(contracted[0])", "False"),
    ),
    *_of(
        "tfdist/keras/zero.py",
        "tests/keras/test_zero.py -k 'clipped_rows and mesh or whole_weights and mesh'",
        ("squares[i] = total", "pass"),
        ("tf.convert_to_tensor(grad), norm)", "grad, norm)"),
    ),
    *_of(
        "tfdist/cluster/rendezvous/background.py",
        "tests/cluster/test_background.py",
        ("threading.Thread(target=_end_with, args=(parent,), daemon=True).start()", "pass"),
        ("numbers[begin : begin + _BATCH])", "numbers[begin : begin + 1])"),
        ('if "error" in outcome:', "if False:"),
    ),
    *_of(
        "tfdist/utils/turns.py",
        "tests/cli/test_server.py",
        ("while not _has_one(held, names)", "while False"),
    ),
    *_of(
        "tfdist/strategies/parameter_server/passes.py",
        "tests/contract/test_data.py -k '(shuffle) and parameter_server'",
        ("vars(step)[_BEGUN] = count + 1", "pass"),
        ("            _iterate(step)", "            pass"),
        ("        return read_here(self, begin_pass(self))", "        return _iterate(self)"),
        ("repeated and vars(step).get(_BEGUN, 0) for", "False for"),
    ),
    *_of(
        "tfdist/strategies/scope.py",
        "tests/contract/test_scope.py -k 'cleared and multi_worker'",
        ("                scope.leave()", "                pass"),
        ("            scope.enter()\n", "            pass\n"),
        ("for scope in _open.value:", "for scope in _open.value[:1]:"),
    ),
    *_of(
        "tfdist/strategies/constructors.py",
        "tests/unit/test_constructors.py",
        ('"tf.compat.v2.distribute", "tf.compat.v1.distribute"', '"tf.compat.v2.distribute"'),
    ),
    # Workers that read different data, and updates that nobody waits for any more.
    *_of(
        "tfdist/keras/input_comparison.py",
        "tests/keras/test_first_batches.py -k 'refused'",
        ("if len(set(digests)) > 1:", "if False:"),
        ("sha.update(np.ascontiguousarray(array).tobytes())", "pass"),
        ("_compare(tf.distribute.get_strategy(), batches, reads)", "pass"),
    ),
    *_of(
        "tfdist/keras/batches.py",
        "tests/keras/test_values.py -k refused",
        ("compare_values(strategy, as_values(batch))", "pass"),
    ),
    *_of(
        "tfdist/keras/model_optimizers.py",
        "tests/contract/test_updates.py --tier=everything -k 'wherever_it_is_held and mirrored'",
        (
            "        result.update((id(each), each) for each in noted if each is not None)",
            "        pass",
        ),
    ),
    *_of(
        "tfdist/keras/updating.py",
        "tests/contract/test_updates.py --tier=everything -k 'mirrored'",
        ('batches=bool(kwargs.get("_use_cached_eval_dataset")))', "batches=False)"),
        ('        flush(getattr(self, "_model", None), batches=True, late=False)', "        pass"),
        ('        flush(getattr(self, "_model", None), batches=True)\n', "        pass\n"),
        ("[*optimizers_of(model), *others]", "optimizers_of(model)"),
    ),
    *_of(
        "tfdist/strategies/parameter_server/step_function.py",
        "tests/servers/test_workers.py -k has_failed",
        ("self.servers.refuse_before(self.dispatcher.next_number() * UPDATES_A_STEP)", "pass"),
    ),
    *_of(
        "tfdist/strategies/parameter_server/remote_step.py",
        "tests/contract/test_steps.py --tier=everything "
        "-k '(looked_up_again or lagging) and parameter_server'",
        (
            "        self._see_update(variable)\n        if id(variable) in self._changed",
            "        if False",
        ),
        ("(_is_setting(variable) and not counted)", "_is_setting(variable)"),
    ),
    # Examples that meet by their places, and gradients of examples.
    *_of(
        "tfdist/keras/example_order.py",
        "tests/unit/test_dependence.py",
        ("return len(orders) > 1", "return False"),
        ("return each is not None and each < 1", "return False"),
        ("return (*order, _Rows(each))", "return order"),
        (' or (op.type == "GatherV2" and self._keeps_all(op.inputs[1]))', ""),
        ('op.type in ("ReverseV2", "StridedSlice") and first', "first"),
        ("and not has_rows and", "and"),
    ),
    *_of(
        "tfdist/keras/losses.py",
        "tests/contract/test_steps.py --tier=everything -k 'adversarial and mirrored'",
        ("    result = step.weigh(gradient)\n", "    result = gradient\n"),
    ),
    *_of(
        "tfdist/keras/optimizers.py",
        "tests/contract/test_steps.py --tier=everything -k 'adversarial_clipped and mirrored'",
        ("[None if own else each for each, own in zip(flat, is_own, strict=True)]", "flat"),
    ),
    *_of(
        "tfdist/keras/whole_batch.py",
        "tests/contract/test_statistics.py --tier=everything -k 'mirrored and generated'",
        ("any(each.reduced for each in inputs)", "False"),
    ),
    *_of(
        "tfdist/strategies/pipeline/stage.py",
        "tests/contract/test_statistics.py --tier=everything -k pipeline_refuses",
        ("with settling.set(step):", "with settling.set(None):"),
        ("settled(step, call.node.operation, (args, kwargs), outputs)", "pass"),
    ),
    # Layers that several stages call, and weights in frozen layers.
    *_of(
        "tfdist/strategies/pipeline/stage.py",
        "tests/pipelines/test_pipelines.py -k 'several_stages_call or low_rank'",
        (
            "{id(v) for v in self.model.trainable_weights}",
            "{id(v) for layer in layers for v in layer.trainable_weights}",
        ),
        ("tf.identity(of_variable[id(v)])", "tf.stop_gradient(of_variable[id(v)])"),
    ),
    *_of(
        "tfdist/strategies/pipeline/partitioning.py",
        "tests/pipelines/test_pipelines.py -k 'stages_read_of or shared'",
        ("if value.consumers()]", "]"),
        ("call.path in met and not _state_of(call.layer)", "call.path in met"),
    ),
    *_of(
        "tfdist/strategies/pipeline/state.py",
        "tests/pipelines/test_pipelines.py -k several_stages_call",
        ("for key, v in chunk.lent.items() if v.trainable}", "for key in ()}"),
    ),
    # Functions, and ops that hide what they do with the examples.
    *_of(
        "tfdist/keras/metric_updates.py",
        "tests/contract/test_metrics.py -k 'depend and (mirrored or server)' --tier=everything",
        ('op.name.rpartition("/")[2].startswith(STATE)', "False"),
        ('op.type == "ReadVariableOp" and id(op.inputs[0]) in states', "False"),
    ),
    *_of(
        "tfdist/strategies/parameter_server/step_function.py",
        "tests/contract/test_metrics.py -k 'in_order and server' --tier=everything",
        ('self._method == "test_step" and traced.assigns', "False"),
    ),
    *_of(
        "tfdist/strategies/horovod/collectives.py",
        "tests/horovod/test_ring.py -k 'loop or still_meet' --tier=everything",
        ("self._orders[name.number % _AT_A_TIME]", "self._orders[0]"),
    ),
    # Values that a step goes on with: states of optimizers, gradients, TensorFlow's variables.
    *_of(
        "tfdist/keras/weights.py",
        "tests/contract/test_steps.py --tier=everything -k 'mirrored and (taken_back or by_loss)'",
        ("    check_moved(step)\n", ""),
    ),
    *_of(
        "tfdist/keras/optimizers.py",
        "tests/contract/test_steps.py --tier=everything -k 'mirrored and by_'",
        ("grads = [_of_one_device(step, *pair) for pair in", "[pair for pair in"),
    ),
    *_of(
        "tfdist/keras/plain_variables.py",
        "tests/contract/test_steps.py --tier=everything -k 'mirrored and plain_variables'",
        ("return at_once(step, value, ", "return (lambda *each: each[1])(step, value, "),
    ),
    *_of(
        "tfdist/keras/example_axes.py",
        _MEET.format("share or variance or largest"),
        ('_ALONG_LAST = frozenset({"Softmax", ', "_ALONG_LAST = frozenset({"),
    ),
    *_of(
        "tfdist/keras/example_axes.py",
        "tests/unit/test_dependence.py",
        ('"If", "StatelessIf", ', ""),
    ),
    *_of(
        "tfdist/keras/example_pairs.py",
        _MEET.format("weighed or half"),
        ("or search.weighs_places(op))):", ")):"),
    ),
    *_of(
        "tfdist/keras/assignments.py",
        "tests/contract/test_losses.py --tier=everything -k 'by_their_places and mirrored'",
        ("check_kept(step, value)", "pass"),
    ),
    *_of(
        "tfdist/keras/metric_updates.py",
        "tests/contract/test_losses.py --tier=everything -k 'by_their_places and mirrored'",
        ("check_kept(step, value)", "pass"),
    ),
    *_of(
        "tfdist/strategies/parameter_server/apply_update.py",
        "tests/servers/test_programs.py -k model_that_is_gone",
        ("fresh_zeros(self._sum)", "tf.zeros(self._sum.shape, self._sum.dtype)"),
    ),
    *_of(
        "tfdist/keras/example_pairs.py",
        "tests/unit/test_dependence.py",
        ("or self._is_count(tensor)", ""),
    ),
    *_of(
        "tfdist/keras/functions.py",
        "tests/contract/test_metrics.py --tier=everything -k 'mirrored and function'",
        ("step is not None and not", "False and not"),
        ("tf.nest.map_structure(_as_argument, args, specs)", "args"),
    ),
    *_of(
        "tfdist/keras/functions.py",
        "tests/contract/test_steps.py --tier=everything -k 'single and by_themselves'",
        ("@wraps(fn.python_function, updated=())", "@wraps(fn.python_function)"),
    ),
    *_of(
        "tfdist/keras/reductions.py",
        "tests/contract/test_losses.py --tier=everything -k 'neither_means'",
        ("            return str(op.type)\n", "            break\n"),
    ),
    *_of(
        "tfdist/keras/reductions.py",
        "tests/contract/test_metrics.py --tier=everything -k 'mirrored and hides'",
        ("return None if _are_distinct(_counted(op)) else Leaf", "return Leaf"),
    ),
    *_of(
        "tfdist/keras/assignments.py",
        "tests/contract/test_losses.py --tier=everything -k 'neither_means'",
        ("result.unknown & CHOOSING if of_keras else result.unknown", "result.unknown & CHOOSING"),
    ),
    *_of(
        "tfdist/_tf/graphs.py",
        "tests/unit/test_graphs.py",
        ("        if inputs:\n            with tf", "        if False:\n            with tf"),
    ),
    *_of(
        "tfdist/strategies/pipeline/layer_state.py",
        "tests/pipelines/test_layer_state.py --tier=everything",
        ("* step.total // tf.maximum(step.count, 1)", "* 1"),
        (
            "return tensor * step.per_share(tensor.dtype) if leaf.is_sum else tensor",
            "return tensor",
        ),
        ("if found.unknown or not (counts or is_average):", "if found.unknown:"),
        (
            "found = assigned_variables(graph) if microbatches > 1 or recompute",
            "found = [] if True",
        ),
    ),
    *_of(
        "tfdist/keras/stateless.py",
        "tests/pipelines/test_layer_state.py --tier=everything -k 'one_microbatch'",
        ("super().add_update((variable, tf.stop_gradient(value)))", "super().add_update(update)"),
    ),
    *_of(
        "tfdist/placement/plan.py",
        "tests/pipelines/test_layer_state.py --tier=everything",
        ("keras.StatelessScope(), ", ""),
        ("            variable.assign(value)", "            pass"),
    ),
    *_of(
        "tfdist/keras/updating.py",
        "tests/contract/test_updates.py --tier=everything -k 'new_optimizer and mirrored'",
        (
            "        flush(self, batches=True)\n        original(self, *args",
            "        original(self, *args",
        ),
    ),
    *_of(
        "tfdist/gradients/optimizer_state.py",
        "tests/contract/test_updates.py --tier=everything -k 'two_optimizers and mirrored'",
        ("            self._check_alone(indices, weights)", "            pass"),
    ),
    # What travels by itself, what is kept, and what is waited for.
    *_of(
        "tfdist/comm/replica_collectives.py",
        "tests/unit/test_updates.py -k travel",
        ('if "GPU" in tf.distribute', 'if "CPU" in tf.distribute'),
        ("size_of(each) >= ALONE_BYTES", "size_of(each) > ALONE_BYTES"),
    ),
    Mutant(
        "tfdist/comm/replica_collectives.py",
        "supply = iter(sums[i] for i in range(len(flat)))",
        "supply = iter(sums.values())",
        "tests/contract/test_training.py -k 'large_and_small and multi_worker'",
    ),
    *_of(
        "tfdist/sharding/gathering.py",
        "tests/unit/test_sharding.py -k 'gathered_again or is_gathered'",
        ("if use is not uses[-1]:", "if use is uses[-1]:"),
        ("if size_of(use.whole) < early else", "if size_of(use.whole) > early else"),
        ("return tensor if before is None else before", "return tensor"),
    ),
    *_of(
        "tfdist/keras/building.py",
        "tests/contract/test_steps.py -k 'scales_its_losses and multi_worker'",
        ("return made.pop(name) if name in made else add(", "return add("),
    ),
    Mutant(
        "tfdist/keras/optimizers.py",
        "if step is None and not self.built and is_symbolic(loss):",
        "if False:",
        "tests/contract/test_steps.py -k 'scales_its_losses and multi_worker'",
    ),
    Mutant(
        "tfdist/utils/watchdog.py",
        "_call_of_tensorflow() == place:",
        "_call_of_tensorflow() != place:",
        "tests/unit/test_watchdog.py -k one_call",
    ),
    Mutant(
        "tfdist/strategies/pipeline/train_function.py",
        "        check_stateless(model)\n",
        "",
        "tests/pipelines/test_pipelines.py -k mistakes",
    ),
    Mutant(
        "tfdist/strategies/pipeline/hooks.py",
        "            complete_on(self.device)\n",
        "            pass\n",
        "tests/jobs/test_pipelines.py --tier=everything -k just_assigned",
    ),
    *_of(
        "tfdist/keras/stopping.py",
        "tests/keras/test_callbacks.py -k 'leave_an_evaluation and multi_worker'",
        ("host_collectives.any_worker(strategy, stops)", "stops"),
        ("host_collectives.any_worker(strategy, own)", "own"),
        ("            setattr(model, flag, False)\n", ""),
    ),
    *_of(
        "tfdist/keras/replica_context.py",
        _GRADIENTS,
        ("return self.share(targets[0].dtype)", "return None"),
        ("self.scaled_losses[id(targets[0])] = final[0]", "pass"),
    ),
    Mutant(
        "tfdist/keras/optimizers.py",
        'if not own and not has_own_step(step.model, "train_step"):',
        "if not own:",
        _GRADIENTS,
    ),
    Mutant(
        "tfdist/keras/batch_axes.py",
        "if op.type in PLACING and not depends(op.inputs[PLACING[op.type]]):",
        "if False:",
        "tests/contract/test_losses.py --tier=everything -k 'in_place and parameter_server'",
    ),
]
