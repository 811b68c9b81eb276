"""Descriptions of clusters: TF_CONFIG, schedulers, ports, the meeting of the tasks."""
