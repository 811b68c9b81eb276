"""The command `tfdist`, and the programs of the tasks that it starts."""
