"""TensorBoard's files, and copies of runs in trackers."""
