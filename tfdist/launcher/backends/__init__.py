"""Engines that start the tasks of a job: Slurm, Kubernetes, Ray."""
