"""Diagnosis of runs: rules over run statistics, scaling, machine checks, transfers, profiler traces."""
