"""The loop and what it is made of; plain arguments, no configuration."""
