"""From text to the batches of a run: tokenizer, token datasets, the order of rows, and the loader."""
