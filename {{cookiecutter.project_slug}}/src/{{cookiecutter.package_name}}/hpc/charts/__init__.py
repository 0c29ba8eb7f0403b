"""Axes and lines, without a plotting library."""
