"""Configuration: the schema of every key, files and overrides, cross-checks, comparison."""
