"""Poseidon hands out pre-warmed, isolated code-execution runners to learning platforms."""

__version__ = "0.1.0"
