"""MoE blocks computed from a checkpoint's files and `families.json`, one token at a time.

Nothing here comes from transformers: `make_family_blocks.py` uses this module to prove that the table
describes what transformers computes. It reads three things: the table's entry, `config.json` and the
tensors of `model.safetensors`.
"""

import torch
import torch.nn.functional as F

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4_VALUES = torch.cat([FP4_VALUES, -FP4_VALUES])


def dequantise_mxfp4(blocks, scales):
    """[…, groups, 16] bytes and […, groups] exponents to […, groups × 32] float32."""
    low, high = FP4_VALUES[(blocks & 15).long()], FP4_VALUES[(blocks >> 4).long()]
    values = torch.stack([low, high], -1).flatten(-2)
    return torch.ldexp(values, scales.int()[..., None] - 127).flatten(-2)


class PlainBlock:
    """The MoE block of one layer of a checkpoint."""

    def __init__(self, family, config, tensors, layer):
        self.family = family
        self.config = config
        for key in filter(None, family["config"].split(".")):
            self.config = self.config[key]
        self.layer = layer
        self.prefix = family["layer_prefix"].format(layer=layer)
        self.tensors = tensors
        self.used = set()
        self.top_k = self.setting(family["top_k"])
        self.num_experts = self.setting(family["num_experts"])
        self.width = self.setting(family["expert_width"])

    def setting(self, value):
        """A value of the table: a constant, or the first of several keys that the file has."""
        if not isinstance(value, dict):
            return value
        if "instead" in value and self.config.get(value["instead"]["if"]) is not None:
            return self.config[value["instead"]["key"]]
        for key in value["keys"]:
            if key in self.config:
                return self.config[key]
        return value["default"]

    def tensor(self, name, **numbers):
        name = self.prefix + name.format(**numbers)
        self.used.add(name)
        return self.tensors[name].float()

    def linear(self, name, x, bias=False, **numbers):
        """A layer on one row or on many, with the bias beside the weight."""
        out = x @ self.tensor(name, **numbers).T
        return out + self.tensor(name.replace(".weight", ".bias"), **numbers) if bias else out

    # Which layers have experts

    def moe_layers(self):
        rule = self.family["moe_layers"]
        num_layers = self.config.get("num_hidden_layers")
        if rule.get("length_is_num_layers"):
            lists = [*rule["keys"], *rule["fallback"]["keys"]]
            found = (self.config[k] for k in lists if k in self.config)
            num_layers = len(next(found, rule["fallback"]["default"]))
        return [i for i in range(num_layers) if self.is_moe_layer(rule, i, num_layers)]

    def is_moe_layer(self, rule, i, num_layers):
        if "keys" in rule:
            given = (self.config[k] for k in rule["keys"] if self.config.get(k) is not None)
            listed = next(given, None)
            if listed is None and "default" in rule:
                listed = rule["default"]
            if listed is None:
                return self.is_moe_layer(rule["fallback"], i, num_layers)
        name = rule["rule"]
        if name == "all":
            enabled = self.setting(rule.get("only_if", True))
            return enabled and self.setting(rule.get("only_if_positive", 1)) > 0
        if name == "first_dense":
            return i >= self.setting(rule["count"])
        if name == "first_n":
            return i < self.setting(rule["count"])
        if name == "sparse_step":
            dense = self.setting(rule["dense_layers"]) or []
            return i not in dense and (i + 1) % self.setting(rule["step"]) == 0
        if name == "every":
            return (i + 1) % self.setting(rule["step"]) == 0
        if name == "period":
            several = self.setting(rule["only_if_above_one"]) > 1
            return several and i % self.setting(rule["period"]) == self.setting(rule["offset"])
        if name == "interval":
            last = self.setting(rule["last"])
            last = num_layers - 1 if last == -1 else last
            in_step = (i + 1) % self.setting(rule["interval"]) == 0
            return in_step and self.setting(rule["first"]) <= i <= last
        if name == "layer_types":
            return listed[i] in rule["moe"]
        if name == "listed":
            return i in listed
        if name == "flags":
            return bool(listed[i])
        if name == "pattern":
            return listed[i] in rule["moe"]
        raise ValueError(name)

    # Router

    def route(self, x, token_ids=None):
        """[tokens, hidden] to (logits, experts [tokens, top_k], weights [tokens, top_k])."""
        router = self.family["router"]
        if "input" in router:
            mean_square = x.square().mean(-1, keepdim=True)
            x = x * torch.rsqrt(mean_square + self.setting(router["input_eps"]))
            x = x * self.tensor(router["input_scale"]) * x.shape[-1] ** -0.5
        if router["scoring"] == "zaya_mlp":
            return self.route_zaya(x)
        logits = x @ self.tensor(router["weight"]).T
        if "bias" in router:
            logits = logits + self.tensor(router["bias"])
        softcap = self.setting(router.get("logit_softcap", 0.0))
        if softcap > 0.0:
            logits = torch.tanh(logits / softcap) * softcap
        scoring = router["scoring"]
        if "scoring_key" in router:
            scoring = router["scoring_key"]["values"][self.setting(router["scoring_key"])]
        if scoring == "sparsemixer":
            return (logits, *self.sparsemixer(logits))
        if scoring == "sigmoid_joint_with_shared":
            return self.route_joint(logits)
        if scoring in ("softmax_over_top_k", "sigmoid_over_top_k"):
            chosen, idx = logits.topk(self.top_k, -1)
            weights = chosen.softmax(-1) if scoring.startswith("softmax") else chosen.sigmoid()
        else:
            scores = {
                "softmax": lambda: logits.softmax(-1),
                "sigmoid": lambda: logits.sigmoid(),
                "sqrtsoftplus": lambda: F.softplus(logits).sqrt(),
            }[scoring]()
            if self.is_hash_layer():
                idx = self.tensor(router["hash"]["table"])[token_ids.long()].long()
            else:
                idx = self.choose(logits if router.get("choose_by") == "logits" else scores)
            weights = scores.gather(1, idx)
        renormalise = self.setting(router["renormalise"])
        if renormalise and router.get("renormalise_only_for", scoring) == scoring:
            total = weights.sum(-1, keepdim=True) + router.get("renormalise_add", 0.0)
            weights = weights / total.clamp(min=self.setting(router.get("renormalise_min", 0.0)))
        weights = weights * (self.setting(router.get("scale", 1.0)) or 1.0)
        if "expert_scale" in router:
            weights = weights * self.tensor(router["expert_scale"])[idx]
        if router.get("divide_by_top_k"):
            weights = weights / self.top_k
        return logits, idx, weights

    def is_hash_layer(self):
        rule = self.family["router"].get("hash")
        return rule is not None and self.is_moe_layer(rule["layers"], self.layer, None)

    def choose(self, scores):
        router = self.family["router"]
        choice = scores
        if "choice_bias" in router and self.setting(router.get("choice_bias_if", True)):
            choice = choice + self.tensor(router["choice_bias"]).flatten()
        groups = router.get("groups")
        if groups and "only_if" in groups:
            groups = groups if self.setting(groups["only_if"]) == groups["only_if"]["value"] else None
        if groups:
            count, keep = self.setting(groups["count"]), self.setting(groups["keep"])
            grouped = choice.view(len(choice), count, -1)
            if groups["score"] == "max":
                group_scores = grouped.max(-1).values
            else:
                group_scores = grouped.topk(2, -1).values.sum(-1)
            kept = torch.zeros_like(group_scores, dtype=torch.bool)
            kept.scatter_(1, group_scores.topk(keep, -1).indices, True)
            choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
        return choice.topk(self.top_k, -1).indices

    def sparsemixer(self, logits):
        jitter = self.setting(self.family["router"]["jitter"])
        idx, weights, left = [], [], logits
        for _ in range(2):
            best = left.max(-1, keepdim=True)
            factor = torch.maximum(logits.abs(), best.values)
            far = (best.values - logits) / factor > 2 * jitter
            probabilities = left.masked_fill(far, float("-inf")).softmax(-1)
            idx.append(best.indices)
            weights.append(probabilities.gather(-1, best.indices))
            left = left.scatter(-1, best.indices, float("-inf"))
        return torch.cat(idx, -1), torch.cat(weights, -1)

    def route_joint(self, logits):
        router = self.family["router"]
        routed, shared = logits[:, : self.num_experts], logits[:, self.num_experts :]
        idx = self.choose(routed.sigmoid())
        weights = torch.cat([routed.gather(1, idx), shared], -1).sigmoid()
        weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self.setting(router["scale"]) * self.tensor(router["scale_tensor"])
        self.shared_weights = weights[:, self.top_k :]
        return routed, idx, weights[:, : self.top_k]

    def route_zaya(self, x):
        def linear(name, x):
            return self.linear(f"mlp.gate.{name}.weight", x, True)

        state, eps = linear("down_proj", x), self.setting(self.family["router"]["norm_eps"])
        norm = torch.rsqrt(state.square().mean(-1, keepdim=True) + eps)
        state = state * norm * self.tensor("mlp.gate.router_mlp.norm.weight")
        state = F.gelu(linear("router_mlp.fc1", state))
        state = F.gelu(linear("router_mlp.fc2", state))
        logits = state @ self.tensor(self.family["router"]["weight"]).T
        scores = logits.softmax(-1)
        idx = self.choose(scores)
        weights = scores.gather(1, idx)
        skip = idx == self.num_experts
        return logits, idx.masked_fill(skip, 0), weights.masked_fill(skip, 0.0)

    # Experts

    def activation(self, gate, up, family):
        name = family["function"]
        if name == "swiglu_oai":
            alpha, limit = self.setting(family["alpha"]), self.setting(family["limit"])
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (up + 1) * gate * torch.sigmoid(alpha * gate)
        act = ACTIVATIONS[self.setting(family["activation"])]
        if name == "ungated":
            return act(up)
        if name == "clamped_gated":
            limit = self.setting(family["limit"])
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return act(gate) * up

    def split(self, gate_up, order):
        """Splits the last dimension."""
        if order == "interleaved":
            return gate_up[..., 0::2], gate_up[..., 1::2]
        return gate_up.chunk(2, -1)

    def fused(self, names, which, rows):
        """A fused tensor as [experts, out, in], whatever its layout on disk."""
        quantised = self.family.get("mxfp4", {})
        blocks = quantised.get(which + "_blocks")
        if blocks and self.prefix + blocks in self.tensors:
            scales = quantised[which + "_scales"]
            self.used |= {self.prefix + blocks, self.prefix + scales}
            return dequantise_mxfp4(self.tensors[self.prefix + blocks], self.tensors[self.prefix + scales])
        weight = self.tensor(names[which])
        transposed = names["transposed"]
        if transposed == "by_shape":
            transposed = weight.shape[1] != rows
        return weight.transpose(1, 2) if transposed else weight

    def mlp(self, names, x, expert=None, family=None):
        """One expert, routed or shared, on one row."""
        family = family or self.family
        if names["form"] in ("per_expert", "separate"):
            bias = expert is None and self.setting(self.family["shared"].get("bias_if", False))

            def linear(part, x):
                return self.linear(names[part], x, bias, expert=expert)

            gate = linear("gate", x) if "gate" in names else None
            return linear("down", self.activation(gate, linear("up", x), family))
        hidden = self.config["hidden_size"]
        if (
            self.prefix + names["gate_up"] in self.tensors
            and self.tensors[self.prefix + names["gate_up"]].dim() == 2
        ):
            gate_up, down = self.tensor(names["gate_up"]), self.tensor(names["down"])
        else:
            gate_up = self.fused(names, "gate_up", 2 * self.width)[expert]
            down = self.fused(names, "down", hidden)[expert]
        hidden_row = gate_up @ x
        if names.get("gate_up_bias"):
            hidden_row = hidden_row + self.tensor(names["gate_up_bias"])[expert]
        out = down @ self.activation(*self.split(hidden_row, names["order"]), family)
        return out + self.tensor(names["down_bias"])[expert] if names.get("down_bias") else out

    def experts(self, x, idx, weights):
        """The weighted sum over the chosen experts, as the experts' module returns it."""
        out = torch.zeros_like(x)
        for t in range(len(x)):
            for expert, weight in zip(idx[t].tolist(), weights[t]):
                if self.family["weight_on"] == "input":
                    out[t] += self.mlp(self.family["experts"], weight * x[t], expert)
                else:
                    out[t] += weight * self.mlp(self.family["experts"], x[t], expert)
        return out

    def shared_expert(self, x):
        """The shared expert's [tokens, hidden], or None."""
        shared = self.family.get("shared")
        if shared is None:
            return None
        count, width = self.setting(shared["count"]), self.setting(shared["width_each"])
        if shared.get("absent_if_zero") and count * width == 0:
            return None
        if shared.get("weights") == "router":
            rows = [
                sum(self.shared_weights[t, s] * self.mlp(shared["names"], x[t], s) for s in range(count))
                for t in range(len(x))
            ]
        else:
            family = dict(self.family, activation=shared.get("activation", self.family["activation"]))
            rows = [self.mlp(shared["names"], row, family=family) for row in x]
        out = torch.stack(rows)
        if "gate" in shared:
            out = out * torch.sigmoid(x @ self.tensor(shared["gate"]).T)
        return out

    def expert_names(self):
        """Names of all tensors of routed experts, used or not."""
        if self.family["experts"]["form"] == "fused":
            return set()
        parts = [v for k, v in self.family["experts"].items() if k != "form"]
        return {self.prefix + p.format(expert=e) for p in parts for e in range(self.num_experts)}

    def latent(self, which, x):
        latent = self.family.get("latent")
        if latent is None or self.setting(latent["width"]) is None:
            return x
        return self.linear(latent[which], x, self.setting(latent["bias_if"]))

    def block(self, x, experts_x=None, token_ids=None):
        """The whole block; returns (logits, idx, weights, routed, out)."""
        logits, idx, weights = self.route(x, token_ids)
        inner = self.latent("down", x) if experts_x is None else experts_x
        routed = self.experts(inner, idx, weights)
        out = self.latent("up", routed)
        scale = self.family["router"].get("output_scale", 1.0)
        out = out * (self.top_k if scale == "top_k" else self.setting(scale))
        shared = self.shared_expert(x)
        if shared is not None:
            out = out + shared
            if self.setting(self.family["shared"].get("combine", "sum")) == "average":
                out = out / 2
        return logits, idx, weights, routed, out
