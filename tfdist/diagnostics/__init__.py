"""Looks at a machine and a TF_CONFIG and reports mistakes, before TensorFlow does."""

from tfdist.diagnostics.doctor import Report, diagnose

__all__ = ["Report", "diagnose"]
