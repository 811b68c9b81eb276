"""Collectives between replicas and between hosts, and the data that each replica gets."""
