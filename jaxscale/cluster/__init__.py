"""The machines: processes, devices, the mesh."""
