"""What people look at: TensorBoard's files, and copies of runs in MLflow or W&B."""
