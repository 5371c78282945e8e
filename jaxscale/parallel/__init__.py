"""Where arrays lie on the mesh."""
