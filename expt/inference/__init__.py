"""A trained model in use: a run's folder is enough; its dataset is read only on request."""
