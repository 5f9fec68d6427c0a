#!/usr/bin/env python3
"""Make small quantised MoE layers with the libraries that define the schemes, and check them.

    make_reference_formats.py OUT_DIR [SCHEME ...]     write the folders (all schemes by default)
    make_reference_formats.py --check DIR [SCHEME ...] read them back with numpy alone

Versions that wrote the committed folders, on a CPU, Python 3.11: torch 2.15.0, transformers 5.23.0,
safetensors 0.8.0, compressed-tensors 0.20.0, gptqmodel 7.7.0, autoawq 0.2.9, nvidia-modelopt 0.47.0.
`ct-int4-g-idx` needs compressed-tensors 0.12.2 instead, so it runs only when named:

    PYTHONPATH=DIR_WITH_0.12.2 make_reference_formats.py OUT_DIR ct-int4-g-idx

autoawq and gptqmodel install with `pip install --no-deps` (gptqmodel: `--no-build-isolation` too).

README.md describes the folders. `numpy_formats.py` uses no library: it decodes the files from their
bytes and `config.json`. `with_*.py` pack with one library each. Each folder is checked against it when it
is made: every expert, bit for bit against the library's own dequantisation.
"""

import pathlib
import sys

# Folders beside this script are checkpoints, so that no cache may lie among them.
sys.dont_write_bytecode = True

from numpy_formats import check  # noqa: E402


def main():
    arguments = sys.argv[1:]
    checking = arguments[:1] == ["--check"]
    out, *schemes = arguments[checking:]
    out = pathlib.Path(out)
    if checking:
        for folder in sorted(p for p in out.iterdir() if p.is_dir() and p.name != "__pycache__"):
            if not schemes or folder.name in schemes:
                check(folder)
        return
    # The makers need their libraries; checking does not.
    import with_autoawq
    import with_compressed_tensors
    import with_gptqmodel
    import with_modelopt
    import with_transformers

    makers = {}
    for module in (with_compressed_tensors, with_transformers, with_gptqmodel, with_autoawq, with_modelopt):
        makers.update(module.MAKERS)
    for scheme in schemes or [s for s in makers if s != "ct-int4-g-idx"]:
        makers[scheme](scheme, out)


if __name__ == "__main__":
    main()
