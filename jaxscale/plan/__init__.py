"""What a run will take, read from its compiled step."""
