"""The only room that runs kernels: plan, buffers, child processes, journal."""
