"""Map-style datasets in plain PyTorch, one class per file, which do not depend on configuration or parallel modes."""
