"""What a notebook or a script gives to expt.run and expt.sweep, and what it gets back."""
