"""GPU kernels: walk, gradient, noise model, update; compiled by NVRTC where they run."""
