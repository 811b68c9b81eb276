"""The schedulers and launchers that give a process its place in a cluster."""
