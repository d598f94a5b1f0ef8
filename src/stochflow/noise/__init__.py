"""Models of the channel: known, counted, learned, with or without a past."""
