"""The common part: a layer with seeded weights, and its outputs."""

import json

from numpy_formats import PREFIX, PROJECTIONS, check, numpy_dequantise, round_bf16, same_bits

NUM_TOKENS = 12
NUM_EXPERTS = 4
TOP_K = 2
# Module names that stay unquantised, as the libraries' configurations name them.
ROUTER = "model.layers.0.mlp.gate"


class Layer:
    """The weights that a scheme quantises, in bf16, and the configuration of the model."""

    def __init__(self, scheme, hidden=128, width=64):
        import torch
        from transformers import Qwen3MoeConfig

        self.scheme, self.hidden, self.width = scheme, hidden, width
        self.config = Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=hidden,
            intermediate_size=128,
            moe_intermediate_size=width,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP_K,
            norm_topk_prob=True,
            max_position_embeddings=128,
            bos_token_id=0,
            eos_token_id=1,
        )
        self.config.architectures = ["Qwen3MoeForCausalLM"]
        self.config.dtype = "bfloat16"
        self.config._experts_implementation = "eager"
        self.generator = torch.Generator().manual_seed(sum(map(ord, scheme)))
        self.router = self.draw(NUM_EXPERTS, hidden, gain=2.0)
        self.experts = {}
        for expert in range(NUM_EXPERTS):
            for projection in PROJECTIONS:
                shape = (hidden, width) if projection == "down_proj" else (width, hidden)
                self.experts[expert, projection] = self.draw(*shape, uneven=True)

    def draw(self, rows, cols, gain=1.0, uneven=False):
        import torch

        weight = torch.randn(rows, cols, generator=self.generator) * gain / cols**0.5
        if uneven:
            # Uneven sizes and offsets of the blocks of 16 × 16 show a reader that mixes up groups.
            blocks = (-(-rows // 16), -(-cols // 16))
            factor = torch.exp2(2 * torch.rand(blocks, generator=self.generator) - 1)
            offset = 2 * torch.randn(blocks, generator=self.generator) / cols**0.5
            full = [b.repeat_interleave(16, 0).repeat_interleave(16, 1) for b in (factor, offset)]
            weight = weight * full[0][:rows, :cols] + full[1][:rows, :cols] * (gain / 2)
        return weight.to(torch.bfloat16)

    def names(self):
        """Yields (expert, projection, module name)."""
        for expert, projection in self.experts:
            yield expert, projection, f"{PREFIX}experts.{expert}.{projection}"

    def linear(self, expert, projection, dtype):
        import torch

        weight = self.experts[expert, projection].to(dtype)
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        return linear

    def model(self, **overrides):
        """Modules under the Hub's names: one `Linear` per expert and projection."""
        import torch

        def module(**children):
            parent = torch.nn.Module()
            for name, child in children.items():
                parent.add_module(name, child)
            return parent

        experts = torch.nn.ModuleList(
            module(**{p: self.linear(e, p, torch.bfloat16) for p in PROJECTIONS})
            for e in range(NUM_EXPERTS)
        )
        gate = torch.nn.Linear(self.hidden, NUM_EXPERTS, bias=False)
        gate.weight = torch.nn.Parameter(self.router.clone(), requires_grad=False)
        layer = module(mlp=module(gate=gate, experts=experts))
        head = torch.nn.Linear(8, 8, bias=False)
        return module(model=module(layers=torch.nn.ModuleList([layer])), lm_head=head)

    def save(self, out, tensors, dequantised, quantization, extra=None):
        """Writes a folder and checks it. `tensors` are the experts' by their full names,
        `dequantised` the library's weights [out, in] by (expert, projection)."""
        import torch
        from safetensors.torch import save_file
        from transformers import Qwen3MoeForCausalLM

        folder = out / self.scheme
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {PREFIX + "gate.weight": self.router, **tensors}
        save_file(
            {k: v.detach().contiguous() for k, v in tensors.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        self.config.save_pretrained(folder)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        if quantization is not None:
            config["quantization_config"] = quantization
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for name, content in (extra or {}).items():
            (folder / name).write_text(json.dumps(content, indent=4) + "\n")

        block = Qwen3MoeForCausalLM(self.config).float().eval().model.layers[0].mlp
        x = torch.randn(NUM_TOKENS, self.hidden, generator=self.generator)
        with torch.no_grad():
            block.gate.weight.copy_(self.router.float())
            for expert in range(NUM_EXPERTS):
                gate, up, down = (dequantised[expert, p].float() for p in PROJECTIONS)
                block.experts.gate_up_proj[expert].copy_(torch.cat([gate, up]))
                block.experts.down_proj[expert].copy_(down)
            _, weights, idx = block.gate(x)
            routed = block.experts(x, idx, weights)
        assert idx.unique().numel() == NUM_EXPERTS and torch.isfinite(routed).all()
        reference = dict(x=x, topk_idx=idx.to(torch.int32), topk_weights=weights, routed_out=routed)
        for name, projection in zip(("gate", "up", "down"), PROJECTIONS):
            reference["dequant." + name] = dequantised[0, projection].detach().contiguous()
        save_file(reference, folder / "reference.safetensors")

        ours = numpy_dequantise(folder)
        for key, theirs in dequantised.items():
            mine = round_bf16(ours[key]) if theirs.dtype == torch.bfloat16 else ours[key]
            assert same_bits(mine, theirs.float().numpy()), (self.scheme, key)
            # The quantised weight must be near the weight that was drawn.
            drawn = self.experts[key].float()
            error = ((theirs.float() - drawn).norm() / drawn.norm()).item()
            assert error < 0.2, (self.scheme, key, error)
        check(folder)
