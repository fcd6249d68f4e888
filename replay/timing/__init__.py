"""How long it took: spans and probes touch a device; estimate and floors are pure."""
