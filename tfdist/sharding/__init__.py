"""Variables of which each process keeps a part: layouts, their exchange, and the variables."""
