"""Fixtures of the fault-injection tests."""

from reliability.processes import second_slot, slot

__all__ = ["second_slot", "slot"]
