"""A program in another network namespace: `in_namespace.py NAME PROGRAM …`, where a fork is to be what `ip netns exec` starts."""

import ctypes
import os
import runpy
import sys

_, name, *sys.argv = sys.argv
with open(f"/run/netns/{name}") as namespace:
    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace.name)
runpy.run_path(sys.argv[0], run_name="__main__")
