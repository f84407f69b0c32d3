"""Which points to try next: the space, what is known of it, and who chooses.

The run folders are the only state.
"""
