"""The experts of a checkpoint in numpy: an independent reference for what the service computes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

TINY = Path(__file__).resolve().parents[2] / "data" / "tiny-moe"

F32 = npt.NDArray[np.float32]


class Experts:
    """Experts of the family of Qwen3-MoE, in float64."""

    def __init__(self, folder: Path = TINY) -> None:
        self._file = folder / "model.safetensors"
        with self._file.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            self._header = json.loads(file.read(length))
        self._begin = 8 + length
        config = json.loads((folder / "config.json").read_text())
        self.hidden = int(config["hidden_size"])
        self.num_experts = int(config["num_local_experts"])
        self.top_k = int(config["num_experts_per_tok"])
        self.num_layers = int(config["num_hidden_layers"])

    def forward(self, layer: int, x: F32, topk_idx: npt.NDArray[np.int32], topk_weights: F32) -> F32:
        """Return the weighted sums, ``[tokens, hidden]``."""
        out = np.zeros(x.shape, np.float64)
        for expert in range(self.num_experts):
            rows, entries = np.nonzero(topk_idx == expert)
            if not len(rows):
                continue
            gate, up, down = (self._weight(layer, expert, name) for name in ("gate", "up", "down"))
            inputs = x[rows].astype(np.float64)
            gated = inputs @ gate.T
            inner = gated / (1.0 + np.exp(-gated)) * (inputs @ up.T)
            np.add.at(out, rows, inner @ down.T * topk_weights[rows, entries, None].astype(np.float64))
        return out.astype(np.float32)

    def _weight(self, layer: int, expert: int, name: str) -> npt.NDArray[np.float64]:
        entry = self._header[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"]
        assert entry["dtype"] == "BF16"
        begin, end = entry["data_offsets"]
        halves = np.fromfile(self._file, np.uint16, (end - begin) // 2, offset=self._begin + begin)
        return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64).reshape(entry["shape"])
