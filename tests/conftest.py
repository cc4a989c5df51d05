"""How long the property tests search: briefly with every run, for hours with `--hypothesis-profile=nightly`."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "nightly",
    max_examples=5_000,
    stateful_step_count=80,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
