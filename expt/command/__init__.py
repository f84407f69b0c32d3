"""From words to runs: the command line, Hydra, a sweep's runs.

The only package that imports Hydra.
"""
