"""The CUDA driver, woken while Python is still busy with imports: it takes some tenths of a second and no Python."""

import ctypes
import threading

_DRIVER = "libcuda.so.1"


def wake_driver(rank: int) -> threading.Thread:
    """Begins to initialize the driver, and on this rank's GPU a context, which torch then finds; join the thread before
    torch asks for a device. Without a driver or a GPU nothing happens: torch will say so.
    """
    thread = threading.Thread(target=_wake, args=(rank,), name="driver", daemon=True)
    thread.start()
    return thread


def _wake(rank: int) -> None:
    try:
        driver = ctypes.CDLL(_DRIVER)  # whose calls let go of the interpreter's lock
    except OSError:
        return
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return
    if driver.cuDeviceGet(ctypes.byref(device), rank % count.value) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
