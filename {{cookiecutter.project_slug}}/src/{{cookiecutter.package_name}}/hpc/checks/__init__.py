"""What is refused before the queue, and what a node is asked before training."""
