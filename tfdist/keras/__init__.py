"""The hooks by which Keras trains on a strategy as in one process."""
