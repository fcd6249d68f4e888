"""The truth, on the CPU, in numpy, with named modes. Shares no code with any kernel and imports none."""
