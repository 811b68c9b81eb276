"""TensorFlow's private names, and the functions that need them."""

from tfdist.cluster.validation.machine import check_versions

check_versions()
