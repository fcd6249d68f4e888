"""Replay what a vLLM endpoint did through candidate kernels, and say which of them are exact and faster."""

__version__ = "0.1.0"
