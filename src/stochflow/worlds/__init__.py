"""The geometry of moves (environments) and chance (channels)."""
