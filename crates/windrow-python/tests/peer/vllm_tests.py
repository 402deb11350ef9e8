"""Runs vLLM's own tests of its causal convolutions with Windrow's functions in place of its kernels.

    python vllm_tests.py CHECKOUT [--device cpu|cuda] [--summary FILE] [pytest options]

CHECKOUT is vLLM's repository or its source package, of which the test files alone are taken: those of the Triton
kernels, and on the CPU of its functions and operators for the CPU. Nothing else of vLLM runs but what sends to these
operators (`gdn_attention.py`): what is imported from vLLM are stand-ins. So this shows the functions, not the engine.
Needs einops. The summary is JSON: how many passed and were skipped, which failed, how often each function was called,
and the commit.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import windrow.vllm
from stand_ins import counted, put, run_tests

TESTS = "tests/kernels/mamba/test_causal_conv1d.py"
# Where the checkout has them: those of operators for the CPU, of which the convolutions are chosen by name, and of tables.
TESTS_ON_CPU = ["test_cpu_gdn_ops.py", "test_cpu_causal_conv1d_block_table.py"]
# Not of convolutions, or of what vLLM itself says of a wrong number, where Windrow says another thing.
LEFT_OUT = "not (causal_conv1d_update_cpu_rejects_invalid_accepted_count)"
FUNCTIONS = ["causal_conv1d_fn", "causal_conv1d_update"]
OPS = "vllm.model_executor.layers.mamba.ops"


class Platform:
    """What the tests ask of vLLM's platform."""

    def __init__(self, device: str) -> None:
        self.device_type = device

    def is_cuda_alike(self) -> bool:
        # The tests that ask for it run on any device here.
        return True

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def is_xpu(self) -> bool:
        return False

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def get_cpu_architecture(self) -> str:
        return "x86"


def stand_ins(device: str) -> dict[str, int]:
    """Puts modules in place of vLLM's; counts the calls of the functions."""
    calls: dict[str, int] = {}
    functions = counted({name: getattr(windrow.vllm, name) for name in FUNCTIONS}, calls)
    put(
        {
            "vllm.platforms": {"current_platform": Platform(device)},
            "vllm.utils.torch_utils": {"set_random_seed": torch.manual_seed},
            "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
            f"{OPS}.causal_conv1d": functions,
        }
    )
    return calls


def stand_ins_on_the_cpu(checkout: Path, calls: dict[str, int]) -> None:
    """The functions for the CPU, and the module that sends to its operators."""
    nothing = lambda *args, **kwargs: None
    on_the_cpu = [f"{name}_cpu" for name in FUNCTIONS]
    # One of them has the name of another function.
    operators = counted({f"operator {name}": f for name, f in windrow.vllm._OPERATORS.items()}, calls)
    operators = {name.removeprefix("operator "): f for name, f in operators.items()}
    put(
        {
            f"{OPS}.cpu.causal_conv1d": counted({n: getattr(windrow.vllm, n) for n in on_the_cpu}, calls),
            "vllm._custom_ops": operators,
            "vllm.platforms": {"CpuArchEnum": SimpleNamespace(ARM="arm")},
            "vllm.utils.torch_utils": {
                "LayerNameType": str,
                "_resolve_layer_name": nothing,
                "direct_register_custom_op": nothing,
            },
            "vllm.forward_context": {"ForwardContext": object, "get_forward_context": nothing},
            "vllm.logger": {"init_logger": lambda name: SimpleNamespace(info=nothing)},
            "vllm.triton_utils": {"HAS_TRITON": False},
            "vllm.model_executor.layers.mamba.mamba_utils": {"is_conv_state_dim_first": lambda: False},
            "vllm.v1.attention.backends.gdn_attn": {"GDNAttentionMetadata": SimpleNamespace},
        }
    )
    name = f"{OPS}.cpu.gdn_attention"
    spec = importlib.util.spec_from_file_location(name, checkout / (name.replace(".", "/") + ".py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    put({name: {}})
    sys.modules[name] = module
    setattr(sys.modules[f"{OPS}.cpu"], "gdn_attention", module)
    spec.loader.exec_module(module)
    # The operators are not vLLM's, so that they need no CPU of theirs.
    torch.cpu._is_amx_tile_supported = lambda: True
    torch.cpu._is_avx512_bf16_supported = lambda: True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--summary", type=Path)
    options, rest = parser.parse_known_args()
    file = options.checkout / TESTS
    if not file.exists():
        parser.error(f"{file} is not there: vLLM's wheel leaves tests out, its repository has it")
    calls, files = stand_ins(options.device), [file]
    if options.device == "cpu":
        files += [other for name in TESTS_ON_CPU if (other := file.parent / "cpu" / name).exists()]
        stand_ins_on_the_cpu(options.checkout, calls)
        rest += ["-k", f"conv1d and {LEFT_OUT}"]
    return run_tests("vllm", options.device, files, calls, options.summary, rest)


if __name__ == "__main__":
    sys.exit(main())
