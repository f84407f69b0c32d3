"""Tasks: the loss that a step computes, and the metrics; see task."""
