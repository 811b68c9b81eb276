"""The schedulers and launchers that assign a process its task in a cluster."""
