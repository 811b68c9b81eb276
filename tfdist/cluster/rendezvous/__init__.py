"""The meeting of the tasks of a job before TensorFlow starts."""
