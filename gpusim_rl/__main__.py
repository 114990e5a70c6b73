"""`python -m gpusim_rl` is the command `gpusim-rl`."""

from gpusim_rl.cli import main

if __name__ == "__main__":
    main()
