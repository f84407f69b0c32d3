"""One rank of a run: builds everything, in order, and trains."""
