"""The private parts of torch that expt reads or replaces, all of them; each gives way where torch
has changed.
"""
