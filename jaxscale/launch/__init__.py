"""Starting runs of several processes."""
