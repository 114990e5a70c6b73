"""What the tests of a task package use: the conformance suite and a counter of host syncs."""
