"""Builds Horovod from its released source for the installed TensorFlow, and installs it.

Horovod's last release does not compile against current TensorFlow as it is. `source.py` lists the
four changes, and why each is made. Nothing here
imports TensorFlow or Horovod: all work is done by processes of their own.
"""

from tfdist.horovod.build.install import Done
from tfdist.horovod.build.install import Order
from tfdist.horovod.build.install import Outcome
from tfdist.horovod.build.install import ensure
from tfdist.horovod.build.commands import Progress

__all__ = ["Done", "Order", "Outcome", "Progress", "ensure"]
