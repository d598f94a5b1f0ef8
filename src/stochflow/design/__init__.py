"""From a laboratory's CSV to the next plate: campaigns of rounds, each with a surrogate, an acquisition and a diverse batch."""
