"""The random numbers of a session's devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tensor_bridge import tensor_bytes

__all__ = ["RandomStates"]


class RandomStates:
    """Random numbers for each device of a client, also where several are the same hardware.

    torch's default generators are what every operator draws from; they have the state of one device
    at a time.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)
        self._states: dict[int, torch.Tensor] = {}
        self._present: dict[torch.device, int] = {}

    def enter(self, device: int) -> None:
        """Have the default generator of the hardware be that of `device`."""
        hardware = self._devices[device]
        present = self._present.get(hardware)
        if present == device:
            return
        generator = _default_generator(hardware)
        if present is not None:
            self._states[present] = generator.get_state()
        self._present[hardware] = device
        state = self._states.pop(device, None)
        if state is not None:
            generator.set_state(state)
        else:
            generator.seed()

    def seed(self, device: int, value: int) -> None:
        """Start over from `value`."""
        self.enter(device)
        _default_generator(self._devices[device]).manual_seed(value)

    def get(self, device: int) -> bytes:
        """Return the state."""
        self.enter(device)
        return bytes(tensor_bytes(_default_generator(self._devices[device]).get_state()))

    def set(self, device: int, state: torch.Tensor) -> None:
        """Go on from `state`, which torch checks."""
        self.enter(device)
        _default_generator(self._devices[device]).set_state(state.cpu().contiguous())


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
