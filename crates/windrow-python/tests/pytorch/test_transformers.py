"""Models of transformers that use causal_conv1d where they find it. Runs where transformers is installed."""

import importlib.util
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

# Prefill, gradients and decoding of models with random weights; tells how often Windrow was called.
SCRIPT = """
import functools, sys, torch
path, stand_in = sys.argv[1], sys.argv[2] == "True"
import windrow.compat.causal_conv1d as compat
calls = 0
if stand_in:
    def counted(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            global calls
            calls += 1
            return function(*args, **kwargs)
        return call
    compat.causal_conv1d_fn = counted(compat.causal_conv1d_fn)
    compat.causal_conv1d_update = counted(compat.causal_conv1d_update)
    compat.install()
from transformers import AutoConfig, AutoModelForCausalLM
sizes = {
    "mamba": dict(state_size=8),
    "mamba2": dict(state_size=16, num_heads=8, head_dim=16, n_groups=2, chunk_size=8),
    "falcon_mamba": dict(state_size=8),
    "lfm2": dict(
        intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
    ),
}
results = {}
for name in sizes:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **dict(vocab_size=128, hidden_size=64, num_hidden_layers=2) | sizes[name])
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(3, 128, (2, 17))
    calls = 0
    logits = model(tokens).logits
    logits.square().mean().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        decoded = model.generate(
            tokens, max_new_tokens=9, min_new_tokens=9, do_sample=False, use_cache=True, pad_token_id=0
        )
    results[name] = (logits.detach(), grads, decoded, calls)
torch.save(results, path)
"""


def test_same_as_without(tmp_path):
    results = []
    for stand_in in (True, False):
        path = tmp_path / f"{stand_in}.pt"
        command = [sys.executable, "-c", SCRIPT, str(path), str(stand_in)]
        subprocess.run(command, check=True)
        results.append(torch.load(path))
    assert len(results[0]) == 4
    for ours, plain in zip(*(side.values() for side in results), strict=True):
        torch.testing.assert_close(ours[0], plain[0], atol=1e-5, rtol=1e-5)
        assert ours[1].keys() == plain[1].keys() and any("conv" in n for n in ours[1])
        for n, grad in ours[1].items():
            torch.testing.assert_close(grad, plain[1][n], atol=1e-6, rtol=1e-4)
        assert torch.equal(ours[2], plain[2])
        # Two layers with a convolution, in prefill twice and once for each of the tokens that follow the first.
        assert (ours[3], plain[3]) == (2 * (2 + 8), 0)


# A row that packs two sequences, and the same ones alone.
PACKED = """
import torch
import windrow.compat.causal_conv1d as compat
compat.install()
from transformers import AutoConfig, AutoModelForCausalLM
torch.manual_seed(0)
config = AutoConfig.for_model(
    "lfm2", vocab_size=128, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
    num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"],
)
model = AutoModelForCausalLM.from_config(config).eval()
lengths = [7, 10]
tokens = torch.randint(3, 128, (1, sum(lengths)))
seq_idx = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None].int()
positions = torch.cat([torch.arange(n) for n in lengths])[None]
with torch.no_grad():
    packed = model(tokens, position_ids=positions, seq_idx=seq_idx, use_cache=False).logits
    alone = [model(part, use_cache=False).logits for part in tokens.split(lengths, 1)]
    apart = model(tokens, position_ids=positions, use_cache=False).logits
torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-5, rtol=1e-5)
# Without the numbers of the sequences the second one's convolutions see the first.
assert (apart - packed).abs().max() > 1e-4
"""


def test_packed_rows():
    subprocess.run([sys.executable, "-c", PACKED], check=True)
