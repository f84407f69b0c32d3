"""YAML to a frozen, checked RunConfig. No torch."""
