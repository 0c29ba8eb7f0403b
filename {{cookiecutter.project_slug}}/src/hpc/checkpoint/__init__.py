"""Written whole or absent, read without executing anything, moved between strategies."""
