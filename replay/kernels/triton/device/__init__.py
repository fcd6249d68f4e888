"""Device code, in Triton."""
