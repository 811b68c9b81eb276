"""Jobs: plans, processes, their supervision, and the engines that start them elsewhere."""
