"""What jaxscale is measured against: each program here has a named peer or limit."""
