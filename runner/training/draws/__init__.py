"""Random numbers that a model or an objective draws in a step: they follow the samples, not the ranks."""
