"""The device that a thread launches on."""

import threading

import torch


class CurrentDevice:
    """Makes a device the current one of whichever thread launches: that is up to each thread."""

    def __init__(self, device: torch.device) -> None:
        """No thread has launched yet."""
        self._device = device
        self._thread = 0  # the one that launched last

    def enter(self) -> None:
        """Make the device the current one of this thread."""
        if self._thread != (thread := threading.get_ident()):
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._thread = thread
