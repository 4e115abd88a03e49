"""This toolkit on a site's own machines: what is written there, and whether it all would work."""
