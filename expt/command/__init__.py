"""From words to runs: the command line, Hydra, a sweep's points.

The only package that imports Hydra.
"""
