"""From a corpus of any size to token datasets: tasks that follow from corpus and config, wherever they run."""
