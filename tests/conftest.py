"""Eight simulated devices for every test, set before JAX starts; `tests/tiny.py` has the models that run on them."""

from jaxscale.cluster.distributed import simulate_devices

simulate_devices(8)
