"""Forms of kernels that only processors run: a work group is one thread, and its compiler makes vectors."""
