"""A Llama of KerasHub, with random weights, learns the help texts of Python and goes on writing.

It needs KerasHub (`pip install keras-hub`), and downloads nothing. The text ships with Python.

    tfdist run examples/kerashub_llama.py
    tfdist run --strategy multi_worker -n 2 examples/kerashub_llama.py
    tfdist run --strategy multi_worker -n 2 --zero 3 examples/kerashub_llama.py

With `--parts 2` each layer is divided over two processes, by KerasHub's own layouts for Llama:

    tfdist run --strategy multi_worker -n 2 examples/kerashub_llama.py --parts 2
"""

import argparse
import pydoc_data.topics

import keras
import keras_hub
import numpy as np

parser = argparse.ArgumentParser(description="Train a Llama on the help texts of Python.")
parser.add_argument("--steps", type=int, default=100, help="updates")
parser.add_argument("--batch-size", type=int, default=32, help="sequences of an update")
parser.add_argument("--length", type=int, default=64, help="letters of a sequence")
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--parts", type=int, default=1, help="processes that share each layer")
parser.add_argument("--prompt", default="The statement", help="what the model goes on with")
args = parser.parse_args()

keras.utils.set_random_seed(0)
text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
letters = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype("int32")
border = len(letters) * 9 // 10


def sequences(part, count, seed):
    """Pieces of the text, and the letter after each letter."""
    starts = np.random.default_rng(seed).integers(0, len(part) - args.length - 1, count)
    rows = part[starts[:, None] + np.arange(args.length + 1)]
    return inputs_of(rows[:, :-1]), rows[:, 1:]


def inputs_of(tokens, known=None):
    """What a Llama reads: letters, and which of them are known."""
    mask = np.zeros_like(tokens)
    mask[:, :known] = 1
    return {"token_ids": tokens, "padding_mask": mask}


Llama = keras_hub.models.LlamaBackbone
if args.parts > 1:
    devices = keras.distribution.list_devices()
    shape = (len(devices) // args.parts, args.parts)
    mesh = keras.distribution.DeviceMesh(shape, ["batch", "model"], devices)
    layouts = Llama.get_layout_map(mesh)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    )
backbone = Llama(
    vocabulary_size=128,
    num_layers=2,
    num_query_heads=4,
    num_key_value_heads=2,
    hidden_dim=args.width,
    intermediate_dim=3 * args.width,
)
model = keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None)
model.compile(
    keras.optimizers.AdamW(3e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    weighted_metrics=["accuracy"],
    sampler="greedy",
)
features, labels = sequences(letters[:border], args.steps * args.batch_size, seed=1)
model.fit(features, labels, batch_size=args.batch_size, shuffle=False)

loss, accuracy = model.evaluate(*sequences(letters[border:], 128, seed=2), verbose=0)
prompt = np.frombuffer(args.prompt.encode("ascii"), np.uint8).astype("int32")
tokens = np.zeros((1, args.length), "int32")
tokens[0, : len(prompt)] = prompt
written = model.generate(inputs_of(tokens, len(prompt)), stop_token_ids=None)["token_ids"]
print(repr(bytes(np.asarray(written)[0].astype("uint8")).decode("ascii")))
print(f"{loss / np.log(2):.2f} bits a letter on held-out text, accuracy {accuracy:.2%}")
