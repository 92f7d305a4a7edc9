"""Shards, files of many samples: the dataset, the index by which it reads samples, and copies of remote blocks."""
