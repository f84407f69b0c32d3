"""The run folder: every file in it.

Only `checkpoint` imports torch.
"""
