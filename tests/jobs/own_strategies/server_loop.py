"""A loop by hand on a ParameterServerStrategy of the program's own, and its coordinator."""

import json

import keras
import tensorflow as tf

strategy = tf.distribute.experimental.ParameterServerStrategy(
    tf.distribute.cluster_resolver.TFConfigClusterResolver()
)

feature_vocab = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
label_vocab = ["yes", "no"]

with strategy.scope():
    feature_lookup = keras.layers.StringLookup(
        vocabulary=feature_vocab, mask_token=None, output_mode="int"
    )
    label_lookup = keras.layers.StringLookup(
        vocabulary=label_vocab, num_oov_indices=0, mask_token=None
    )


def feature_and_label_gen(num_examples=200):
    generator = tf.random.Generator.from_seed(3)
    chosen = generator.uniform((num_examples, 3), 0, len(feature_vocab), tf.int32)
    features = tf.gather(feature_vocab, chosen)
    avenger = tf.reduce_any(features == "avenger", axis=1, keepdims=True)
    return features, tf.where(avenger, "yes", "no")


examples = feature_and_label_gen()


def dataset_fn(_):
    raw = tf.data.Dataset.from_tensor_slices(examples)
    mapped = raw.map(lambda x, y: (feature_lookup(x), tf.cast(label_lookup(y), tf.float32)))
    return mapped.shuffle(200).batch(32).repeat()


with strategy.scope():
    model_input = keras.layers.Input(shape=(3,), dtype="int64", name="model_input")
    emb_layer = keras.layers.Embedding(input_dim=len(feature_vocab) + 1, output_dim=16)
    emb_output = keras.ops.mean(emb_layer(model_input), axis=1)
    dense_output = keras.layers.Dense(units=1, activation="sigmoid")(emb_output)
    model = keras.Model(model_input, dense_output)
    optimizer = keras.optimizers.RMSprop(learning_rate=0.05)
    accuracy = keras.metrics.BinaryAccuracy()
    optimizer.build(model.trainable_variables)


@tf.function
def step_fn(iterator):
    def replica_fn(batch_data, labels):
        with tf.GradientTape() as tape:
            pred = model(batch_data, training=True)
            per_example_loss = keras.losses.BinaryCrossentropy(reduction=None)(labels, pred)
            loss = tf.nn.compute_average_loss(per_example_loss)
            gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        actual_pred = tf.cast(tf.greater(pred, 0.5), tf.float32)
        accuracy.update_state(labels, actual_pred)
        return loss

    batch_data, labels = next(iterator)
    losses = strategy.run(replica_fn, args=(batch_data, labels))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)


@tf.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
per_worker_iterator = iter(per_worker_dataset)

losses = []
for _ in range(4):
    accuracy.reset_state()
    final = [coordinator.schedule(step_fn, args=(per_worker_iterator,)) for _ in range(10)]
    coordinator.join()
    losses.append(sum(float(each.fetch()) for each in final) / 10)
assert losses[-1] < losses[0], losses
assert int(optimizer.iterations.numpy()) == 40
print("RESULT", json.dumps([*losses, float(accuracy.result())]))
