"""A trained model in use: a run's folder is enough, and its dataset is read only where asked for."""
