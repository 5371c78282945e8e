"""Pictures and pages made from the files of a run; needs no jax and no live run."""
