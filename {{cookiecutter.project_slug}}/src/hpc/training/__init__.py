"""Strategies, what they do to a network, loggers and curves, the start of an attempt."""
