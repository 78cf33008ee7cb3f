"""What runs: backend, instruction set, threads."""
