"""One page of a run, and TensorBoard through a tunnel."""
