"""`python -m gpusim_rl`: the command `gpusim-rl`."""

from gpusim_rl import interrupts

if __name__ == "__main__":
    interrupts.install()  # before slow imports

    import sys

    from gpusim_rl.cli import main

    sys.exit(main())
