"""Arguments of expt.run and expt.sweep from a notebook or a script, and their results."""
