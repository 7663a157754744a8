"""Fault tests have deployments of their own, which they may break."""

from tests.system.conftest import golden, model_present, nursery

__all__ = ["golden", "model_present", "nursery"]
