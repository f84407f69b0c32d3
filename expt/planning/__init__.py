"""Plan the memory of each device that a run takes, before it runs."""
