"""Three ways to do one training iteration: plain torch (`eager`), compiled loops (`numba`), GPU kernels (`cuda`)."""
