"""What happens around the steps: checkpoints, signals, the ledger of time, the metrics file."""
