"""Models in plain PyTorch, one class per file; none of them knows how it is configured, trained or spread."""
