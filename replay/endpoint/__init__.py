"""From a result to a served endpoint: what a promotion demands, the launcher it generates, what the launcher checks."""
