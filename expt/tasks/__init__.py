"""What a training step computes, and what is measured: see task."""
