"""CPUs, GPUs, memory, child processes, torch threads and compiler of this process."""
