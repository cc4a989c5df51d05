"""Runs jobs on a Nomad cluster."""
