"""Rules by which gradients become updates: compression, accumulation, delay, clipping."""
