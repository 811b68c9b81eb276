"""TensorFlow's private names, and the functions that need them."""

from tfdist.cluster.validation.machine import warn_of_versions

warn_of_versions()
