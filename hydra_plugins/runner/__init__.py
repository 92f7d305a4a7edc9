"""Hydra's plugins of the runner; Hydra imports all of this for every command, so nothing here imports torch."""
