"""Choose the runs of a search; the run folders are its only state."""
