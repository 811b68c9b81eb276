"""Checks of clusters and machines before a job starts."""
