"""A teacher, and a student trained with its own compute_loss against both."""

import keras
from keras import layers, ops

from tests.cases.digits import load_digits

digits = load_digits()
x = (digits.data / 16.0).astype("float32")[:205]
y = digits.target[:205]

teacher = keras.Sequential([keras.Input((64,)), layers.Dense(48, "relu"), layers.Dense(10)])
student = keras.Sequential([keras.Input((64,)), layers.Dense(8, "relu"), layers.Dense(10)])


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(self, optimizer, metrics, student_loss, distillation_loss, alpha, temperature):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss, self.distillation_loss = student_loss, distillation_loss
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        soft = self.teacher(x, training=False)
        own = self.student_loss(y, y_pred)
        taught = self.distillation_loss(
            ops.softmax(soft / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        )
        return self.alpha * own + (1 - self.alpha) * taught * self.temperature**2

    def call(self, x):
        return self.student(x)


loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
teacher.compile("adam", loss, metrics=["accuracy"])
first = teacher.fit(x, y, batch_size=32, epochs=3, verbose=0)

distiller = Distiller(student, teacher)
distiller.compile(
    optimizer=keras.optimizers.Adam(),
    metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    student_loss=loss,
    distillation_loss=keras.losses.KLDivergence(),
    alpha=0.1,
    temperature=5,
)
second = distiller.fit(x, y, batch_size=32, epochs=3, verbose=0)
score = distiller.evaluate(x[:45], y[:45], verbose=0)

RESULT = {
    "teacher": first.history["loss"],
    "student": second.history["loss"],
    "accuracy": second.history["accuracy"],
    "score": score,
}
