"""What a finished object is worth: oracles, rewards, and the landscapes that ship."""
