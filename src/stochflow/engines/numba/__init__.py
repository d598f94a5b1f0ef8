"""The numba engine: iterations as compiled loops on the CPU. `engine` imports without numba; the other modules decorate."""
