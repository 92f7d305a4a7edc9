"""Map-style data sets in plain PyTorch, one class per file; none of them knows how it is configured or spread."""
