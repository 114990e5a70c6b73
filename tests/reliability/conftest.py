"""Fixtures of the tests that inject faults."""

from reliability.processes import second_slot, slot

__all__ = ["second_slot", "slot"]
