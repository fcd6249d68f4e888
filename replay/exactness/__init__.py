"""Is it exact? Pure: arrays in, a finding out; no device, no file."""

from replay.exactness.compare import Got, Mismatch, compare, digest, padded, same_bits

__all__ = ["Got", "Mismatch", "compare", "digest", "padded", "same_bits"]
