"""Compiled CPU loops: walk, gradient, noise model, update, and many iterations in one call."""
