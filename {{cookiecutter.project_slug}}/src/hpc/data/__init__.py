"""One global order of samples, loaders, packed files, staging."""
