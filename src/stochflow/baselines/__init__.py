"""Rivals that look for good strings without a policy, with the same counting of oracle calls: random search, a genetic algorithm, Markov chains."""
