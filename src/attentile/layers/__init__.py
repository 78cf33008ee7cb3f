"""Modules with weights around `attention`."""
