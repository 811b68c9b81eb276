"""The strategies, each a package with its specification."""
