"""Looks at a machine and a TF_CONFIG and says what would go wrong, before TensorFlow does."""

from tfdist.doctor.diagnosis import diagnose
from tfdist.doctor.report import Report

__all__ = ["Report", "diagnose"]
