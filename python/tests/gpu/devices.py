"""The GPUs of the tests."""

from __future__ import annotations

import torch

#: GPU of the client.
DEVICE = "cuda:0"


def server_devices() -> list[str]:
    """Return the GPUs of two servers: others than the client's, as far as there are any."""
    count = torch.cuda.device_count()
    assert count > 0, "these tests need a GPU, and torch finds none"
    return [f"cuda:{idx}" for idx in range(1, count)][:2] or [DEVICE]
