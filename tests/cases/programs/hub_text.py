"""KerasHub's text classifier, given strings: its preprocessor takes them apart in a data set."""

import keras
import keras_hub
import numpy as np

words = ["the", "cat", "dog", "runs", "sleeps", "fast", "slow", "red", "blue"]
rng = np.random.default_rng(27)
texts = [" ".join(rng.choice(words, rng.integers(2, 7))) for _ in range(29)]
labels = np.array([text.count("cat") > 0 for text in texts], "int32")

vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
tokenizer = keras_hub.models.BertTokenizer(vocabulary=vocabulary)
backbone = keras_hub.models.BertBackbone(
    vocabulary_size=len(vocabulary),
    num_layers=1,
    num_heads=2,
    hidden_dim=16,
    intermediate_dim=32,
    max_sequence_length=10,
    dropout=0.0,
)
backbone.enable_lora(4)
classifier = keras_hub.models.BertTextClassifier(
    backbone=backbone,
    num_classes=2,
    preprocessor=keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=10),
    dropout=0.0,
)
classifier.compile(
    keras.optimizers.SGD(0.1),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = classifier.fit(texts, labels, batch_size=8, epochs=2, verbose=0).history
scores = classifier.predict(["the red cat runs", "the dog", "a bird"], batch_size=2, verbose=0)

RESULT = {
    "loss": history["loss"],
    "accuracy": history["accuracy"],
    "evaluated": classifier.evaluate(texts, labels, batch_size=8, verbose=0),
    "scores": scores.tolist(),
}
