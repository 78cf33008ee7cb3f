"""What a call will do, which keys it reads, and what its weights look like."""
