"""Shards, files of many samples: the dataset, and the index by which it reads samples."""
