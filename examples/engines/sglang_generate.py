"""Generates greedily with SGLang. The routed experts run on expert servers.

    export SWITCHYARD_CONTROL_PLANE=http://127.0.0.1:7070 SWITCHYARD_TOKEN=…
    SGLANG_PLUGINS=switchyard python sglang_generate.py MODEL_FOLDER PROMPTS.json --tokens 64

PROMPTS.json holds a list of prompts, each a list of token ids. The program prints one JSON object per prompt, with the
generated ids. Without SGLANG_PLUGINS the experts stay in SGLang.
"""

import argparse
import json

import sglang


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="prompts at a time")
    parser.add_argument("--device", default=None)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    arguments = parser.parse_args()

    options = {}
    if arguments.device == "cpu":
        options = {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "max_total_tokens": 4096,
            "mem_fraction_static": 0.1,
        }
    engine = sglang.Engine(
        model_path=arguments.model,
        dtype="float32",
        tp_size=arguments.tensor_parallel_size,
        context_length=256,
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        disable_radix_cache=True,
        log_level="warning",
        **options,
    )
    with open(arguments.prompts) as file:
        prompts = json.load(file)
    sampling = {"temperature": 0, "max_new_tokens": arguments.tokens, "ignore_eos": True}
    for first in range(0, len(prompts), arguments.batch):
        batch = prompts[first : first + arguments.batch]
        for number, output in enumerate(engine.generate(input_ids=batch, sampling_params=sampling), first):
            print(json.dumps({"prompt": number, "ids": output["output_ids"][: arguments.tokens]}), flush=True)
    engine.shutdown()


# SGLang starts its workers by `spawn`, which imports this file again.
if __name__ == "__main__":
    main()
