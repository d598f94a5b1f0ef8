"""Policy networks, stacked over seeds."""
