"""Networks, and the checks of their configs."""
