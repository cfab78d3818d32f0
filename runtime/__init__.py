"""Requests, drafters, verification, the loop. Needs NumPy and an engine, never torch."""
