"""Measures Poseidon on this machine, each figure beside its bare reference of the same run. It never asserts."""
