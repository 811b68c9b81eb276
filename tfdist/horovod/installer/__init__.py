"""Builds Horovod from its released source for the installed TensorFlow, and installs it.

Horovod's last release does not compile against current TensorFlow as it is. `compile.py` lists the
four changes, and why each is made. Nothing here
imports TensorFlow or Horovod: all work is done by processes of their own.
"""

from tfdist.horovod.installer.commands import Progress
from tfdist.horovod.installer.install import Done, Order, Outcome, ensure

__all__ = ["Done", "Order", "Outcome", "Progress", "ensure"]
