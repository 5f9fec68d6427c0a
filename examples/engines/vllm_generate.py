"""Generates greedily with vLLM. The routed experts run on expert servers.

    export SWITCHYARD_CONTROL_PLANE=http://127.0.0.1:7070 SWITCHYARD_TOKEN=…
    python vllm_generate.py MODEL_FOLDER PROMPTS.json --tokens 64

PROMPTS.json holds a list of prompts, each a list of token ids. The program prints one JSON object per prompt, with the
generated ids. `--local` keeps the experts in vLLM, for comparison. `--layer-class` leaves the option `quantization`
free, for checkpoints that need it.
"""

import argparse
import json

from vllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--layer-class", action="store_true")
    arguments = parser.parse_args()

    options = {}
    if not arguments.local:
        options["load_format"] = "switchyard"
        # Settings may stand here in place of the environment, all but the token itself.
        options["additional_config"] = {"switchyard": {"ready_timeout": 60}}
        if not arguments.layer_class:
            options["quantization"] = "switchyard"
    llm = LLM(
        model=arguments.model,
        skip_tokenizer_init=True,
        dtype=arguments.dtype,
        max_model_len=256,
        max_num_seqs=8,
        tensor_parallel_size=arguments.tensor_parallel_size,
        enforce_eager=arguments.enforce_eager,
        **options,
    )
    with open(arguments.prompts) as file:
        prompts = json.load(file)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    for number, output in enumerate(outputs):
        print(json.dumps({"prompt": number, "ids": list(output.outputs[0].token_ids)}), flush=True)


# vLLM may start its workers by `spawn`, which imports this file again.
if __name__ == "__main__":
    main()
