"""The run folder: every file in it.

No torch but in `checkpoint`, and in `resume`, which reads one.
"""
