#!/usr/bin/env python3
"""Prints `families.json` as the two Markdown tables of README.md. Needs nothing but Python."""

import json
import pathlib


def key(value):
    """`key` (default), all names of the key in the order in which they win."""
    if not isinstance(value, dict):
        return str(value).lower() if isinstance(value, bool) else str(value)
    names = " / ".join(f"`{k}`" for k in value["keys"])
    default = value.get("default")
    return f"{names} ({'required' if default is None else json.dumps(default)})"


def names(experts):
    if experts["form"] in ("per_expert", "separate"):
        parts = [experts[k] for k in ("gate", "up", "down") if k in experts]
        start = len(parts[0]) - len(parts[0].split(".")[-2]) - len(".weight")
        stems = ",".join(part.split(".")[-2] for part in parts)
        return f"`{parts[0][:start]}{{{stems}}}.weight`"
    layout = {True: "[E, H, 2I]", False: "[E, 2I, H]", "by_shape": "either way round"}[experts["transposed"]]
    order = " interleaved" if experts["order"] == "interleaved" else ""
    bias = ", biases" if experts.get("gate_up_bias") else ""
    return f"`{experts['gate_up']}` {layout}{order}, `{experts['down']}`{bias}"


def function(family):
    name = family["function"]
    if family["activation"] is not None:
        name += " " + key(family["activation"])
    for setting in ("alpha", "limit"):
        if setting in family:
            name += f", {setting} {key(family[setting])}"
    return name + (", weight on the input" if family["weight_on"] == "input" else "")


def layers(rule):
    kind = rule["rule"]
    text = {
        "all": lambda: "all",
        "first_dense": lambda: f"from {key(rule['count'])}",
        "first_n": lambda: f"before {key(rule['count'])}",
        "sparse_step": lambda: f"(i + 1) % {key(rule['step'])} = 0, not in {key(rule['dense_layers'])}",
        "every": lambda: f"(i + 1) % {key(rule['step'])} = 0",
        "period": lambda: f"i % {key(rule['period'])} = {key(rule['offset'])}, more than one expert",
        "interval": lambda: f"(i + 1) % {key(rule['interval'])} = 0, {key(rule['first'])} to {key(rule['last'])}",
        "layer_types": lambda: f"{' / '.join(f'`{k}`' for k in rule['keys'])} = {' or '.join(rule['moe'])}",
        "listed": lambda: f"in `{rule['keys'][0]}`",
        "flags": lambda: f"`{rule['keys'][0]}`[i] ≠ 0",
        "pattern": lambda: f"`{rule['keys'][0]}`[i] = {rule['moe']} (\"{rule['default']}\")",
    }[kind]()
    if "only_if" in rule:
        text += f" if {key(rule['only_if'])}"
    if "only_if_positive" in rule:
        text += f" if {key(rule['only_if_positive'])} > 0"
    return text + ("; else " + layers(rule["fallback"]) if "fallback" in rule else "")


def router(family):
    router = family["router"]
    scoring = router["scoring"]
    if "scoring_key" in router:
        scoring = f"by {key(router['scoring_key'])}"
    parts = [f"`{router['weight']}`", scoring]
    if "bias" in router:
        parts.append(f"bias `{router['bias']}`")
    if "choice_bias" in router:
        condition = f" if {key(router['choice_bias_if'])}" if "choice_bias_if" in router else ""
        added = " on the logits" if router.get("choose_by") == "logits" else ""
        parts.append(f"choice bias `{router['choice_bias']}`{added}{condition}")
    if "groups" in router:
        groups = router["groups"]
        condition = (
            f" if `{groups['only_if']['keys'][0]}` = {groups['only_if']['value']}"
            if "only_if" in groups
            else ""
        )
        parts.append(
            f"best {key(groups['keep'])} of {key(groups['count'])} groups by {groups['score']}{condition}"
        )
    for setting in ("logit_softcap", "jitter"):
        if setting in router:
            parts.append(f"{setting} {key(router[setting])}")
    renormalise = key(router["renormalise"])
    if "renormalise_add" in router:
        renormalise += f" + {router['renormalise_add']:g}"
    if "renormalise_min" in router:
        renormalise += f", sum at least {key(router['renormalise_min'])}"
    parts.append(f"renormalise {renormalise}")
    for setting in ("scale", "output_scale"):
        if setting in router:
            parts.append(f"{setting} {key(router[setting])}")
    for tensor in ("scale_tensor", "expert_scale", "input_scale"):
        if tensor in router:
            parts.append(f"{tensor} `{router[tensor]}`")
    return "; ".join(parts)


def shared(family):
    shared = family.get("shared")
    if shared is None:
        return "none"
    text = f"{names(shared['names'])}; {key(shared['count'])} × {key(shared['width_each'])}"
    if "gate" in shared:
        text += f"; × σ(`{shared['gate']}`)"
    if "bias_if" in shared:
        text += f"; biases if {key(shared['bias_if'])}"
    if "activation" in shared:
        text += f"; {key(shared['activation'])}"
    if "combine" in shared:
        text += f"; {key(shared['combine'])}"
    return text


def main():
    path = pathlib.Path(__file__).parent / "families.json"
    families = json.loads(path.read_text())["families"]
    print("| model_type | class | experts | top-k | expert width | function | experts on disk |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for f in families:
        nested = f"`{f['config']}.`" if f["config"] else ""
        model_type = f["model_type"] + (f" (keys in {nested})" if nested else "")
        classes = ", ".join(f["architectures"])
        settings = " | ".join(key(f[k]) for k in ("num_experts", "top_k", "expert_width"))
        print(
            f"| {model_type} | {classes} | {settings} | {function(f)} | `{f['layer_prefix']}` {names(f['experts'])} |"
        )
    print()
    print("| model_type | layers with experts | router | shared expert |")
    print("| --- | --- | --- | --- |")
    for f in families:
        print(f"| {f['model_type']} | {layers(f['moe_layers'])} | {router(f)} | {shared(f)} |")
    print()
    for f in families:
        for note in f.get("notes", []):
            print(f"- **{f['model_type']}**: {note}")


if __name__ == "__main__":
    main()
