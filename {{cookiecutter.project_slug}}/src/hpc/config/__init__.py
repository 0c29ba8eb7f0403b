"""One composed config, typed and checked, from configs/ and what a person types."""
