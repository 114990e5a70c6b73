"""What limits a run, and why: rules over its numbers, scaling, machine checks, transfers, traces."""
