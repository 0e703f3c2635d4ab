"""`python -m penstock.launcher.child PARENT_PID MODULE FLAGS…`: runs a module that ends when its parent does."""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Becomes the module."""
    parent = int(sys.argv[1])
    if sys.platform == "linux":
        # Without its launcher nobody would restart or stop it. Killed, not asked: that is what services are made for.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    module = sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
