"""What a run will take, before it runs: memory of each card, time of a step, and which strategy to
choose.
"""
