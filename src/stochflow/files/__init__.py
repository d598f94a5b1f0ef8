"""Files that may be anybody's: read through one door, checked against a shape, written whole or not at all."""
