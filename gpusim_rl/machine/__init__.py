"""The machine as this process may use it: CPUs, GPUs, memory, torch's threads and its compiler."""
