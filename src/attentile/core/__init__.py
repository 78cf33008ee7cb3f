"""The arithmetic: the compiled core, and its twin in plain NumPy."""
