"""The training loop and its parts, which take plain arguments and no configuration."""
