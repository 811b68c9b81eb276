"""Layers on devices: by a map, or by a plan of their sizes."""
