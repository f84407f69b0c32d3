"""What a run takes of each device's memory, before it runs."""
