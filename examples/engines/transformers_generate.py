"""Generates greedily with transformers. The routed experts run on expert servers.

    export SWITCHYARD_CONTROL_PLANE=http://127.0.0.1:7070 SWITCHYARD_TOKEN=…
    python transformers_generate.py MODEL_FOLDER PROMPTS.json --tokens 64

PROMPTS.json holds a list of prompts, each a list of token ids. The program prints one JSON object per prompt, with the
generated ids. `--local` keeps the experts in this process, for comparison.
"""

import argparse
import json

import torch
from transformers import AutoModelForCausalLM

import switchyard_moe.transformers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("prompts")
parser.add_argument("--tokens", type=int, default=64)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--local", action="store_true")
arguments = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(
    arguments.model,
    dtype=getattr(torch, arguments.dtype),
    experts_implementation=None if arguments.local else switchyard_moe.transformers.IMPLEMENTATION,
).eval()
print(json.dumps({"parameter_bytes": sum(p.nbytes for p in model.parameters())}), flush=True)

with open(arguments.prompts) as file:
    prompts = json.load(file)
for number, prompt in enumerate(prompts):
    ids = model.generate(
        torch.tensor([prompt]), max_new_tokens=arguments.tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    print(json.dumps({"prompt": number, "ids": ids[0, len(prompt) :].tolist()}), flush=True)
