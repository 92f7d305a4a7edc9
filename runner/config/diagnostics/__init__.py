"""Explanations of wrong input: overrides, keys, options and targets."""
