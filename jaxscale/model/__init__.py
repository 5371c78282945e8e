"""The Transformer: its parts, its losses and objectives, and generation."""
