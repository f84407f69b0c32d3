"""Other dashboards: copies of what run folders hold, sent to MLflow or W&B by a process of their
own.
"""
