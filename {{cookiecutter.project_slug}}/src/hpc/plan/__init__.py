"""A traced training step and a machine become memory, time and cost."""
