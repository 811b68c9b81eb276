"""Files, messages, checks and deadlines that every room uses."""
