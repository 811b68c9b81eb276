"""Estimators with ready-made models: deep, linear, both, and none."""
