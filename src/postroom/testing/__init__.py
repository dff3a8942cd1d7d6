"""Parts to test with, the same that Postroom's own tests use."""

from postroom.testing.clock import ManualClock

__all__ = ["ManualClock"]
