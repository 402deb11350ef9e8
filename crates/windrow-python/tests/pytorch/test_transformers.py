"""Models of transformers that use causal_conv1d where they find it. Runs where transformers is installed."""

import importlib.util
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

# Prefill, gradients and decoding of a model with random weights; tells whether Windrow was called.
SCRIPT = """
import sys, torch
path, name, stand_in = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
import windrow.compat.causal_conv1d as compat
calls = 0
if stand_in:
    def counted(function):
        import functools
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
    "mamba": dict(hidden_size=64, state_size=8),
    "mamba2": dict(hidden_size=64, state_size=16, num_heads=8, head_dim=16, n_groups=2, chunk_size=8),
    "falcon_mamba": dict(hidden_size=64, state_size=8),
}[name]
torch.manual_seed(0)
config = AutoConfig.for_model(name, vocab_size=128, num_hidden_layers=2, **sizes)
model = AutoModelForCausalLM.from_config(config)
tokens = torch.randint(3, 128, (2, 17))
logits = model(tokens).logits
logits.square().mean().backward()
grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
with torch.no_grad():
    decoded = model.generate(
        tokens, max_new_tokens=9, min_new_tokens=9, do_sample=False, use_cache=True, pad_token_id=0
    )
torch.save((logits.detach(), grads, decoded, calls), path)
"""


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba"])
def test_same_as_without(name, tmp_path):
    results = []
    for stand_in in (True, False):
        path = tmp_path / f"{stand_in}.pt"
        command = [sys.executable, "-c", SCRIPT, str(path), name, str(stand_in)]
        subprocess.run(command, check=True)
        results.append(torch.load(path))
    ours, plain = results
    torch.testing.assert_close(ours[0], plain[0], atol=1e-5, rtol=1e-5)
    assert ours[1].keys() == plain[1].keys() and any("conv1d" in n for n in ours[1])
    for n, grad in ours[1].items():
        torch.testing.assert_close(grad, plain[1][n], atol=1e-6, rtol=1e-4)
    assert torch.equal(ours[2], plain[2])
    # Two layers, in prefill twice and once for each of the tokens that follow the first.
    assert (ours[3], plain[3]) == (2 * (2 + 8), 0)
