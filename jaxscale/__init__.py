"""jaxscale: pretraining of language models in JAX, from one laptop core to thousands of hosts."""

__version__ = "0.1.0"
