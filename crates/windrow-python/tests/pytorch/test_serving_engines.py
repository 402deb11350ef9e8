"""How vLLM and SGLang come by Windrow's functions, and which of theirs are left alone; their modules are stand-ins."""

import importlib.util
import subprocess
import sys
import textwrap
from types import ModuleType

import pytest
import windrow.sglang
import windrow.vllm

ENGINE = """
    def causal_conv1d_fn(x, {null}=0): ...
    def causal_conv1d_update(x, {null}=0): ...
    own = [(causal_conv1d_fn, causal_conv1d_update)]
"""
SCRIPT = """
    import sys
    sys.path.insert(0, {folder!r})
    import windrow.{name} as ours
    module = {module!r}
    if {early}:
        import engine_model
    {call}
    {call}
    assert {early} or module.split(".")[0] not in sys.modules, "the engine is imported"
    import engine_model, importlib
    loaded = importlib.import_module(module)
    assert loaded.__spec__.loader.__class__.__module__ == "_frozen_importlib_external"
    for held in (engine_model, loaded):
        assert held.causal_conv1d_fn is ours.causal_conv1d_fn
        assert held.causal_conv1d_update is ours.causal_conv1d_update
    assert engine_model.under_another_name is ours.causal_conv1d_fn
    assert loaded.own[0][0] is not ours.causal_conv1d_fn
"""


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "name, null, module, call",
    [
        (
            "vllm",
            "null_block_id",
            "vllm.model_executor.layers.mamba.ops.causal_conv1d",
            "[p.load()() for p in __import__('importlib.metadata').metadata.entry_points("
            "group='vllm.general_plugins') if p.name == 'windrow']",
        ),
        *(("sglang", "pad_slot_id", module, "ours.install()") for module in windrow.sglang._MODULES),
    ],
)
def test_engines_take_the_functions(tmp_path, name, null, module, call, early):
    """A stand-in of the engine's module, imported before or after the functions are put in place."""
    folder = tmp_path
    for part in module.split(".")[:-1]:
        folder /= part
        folder.mkdir()
        (folder / "__init__.py").touch()
    (folder / (module.rpartition(".")[2] + ".py")).write_text(textwrap.dedent(ENGINE.format(null=null)))
    (tmp_path / "engine_model.py").write_text(
        f"from {module} import causal_conv1d_fn, causal_conv1d_update\n"
        "under_another_name = causal_conv1d_fn\n"
    )
    script = SCRIPT.format(folder=str(tmp_path), name=name, module=module, call=call, early=early)
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_what_is_not_known_stays(monkeypatch):
    name = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)

    def before_null_blocks(x, pad_slot_id=-1): ...
    def of_the_future(x, null_block_id=0, something=None): ...
    def on_the_cpu(x, pad_slot_id=-1, **kwargs): ...

    module.causal_conv1d_fn, module.causal_conv1d_update = before_null_blocks, of_the_future
    module.causal_conv1d_fn_cpu = on_the_cpu
    windrow.vllm.register()
    assert module.causal_conv1d_fn is before_null_blocks
    assert module.causal_conv1d_update is of_the_future
    assert module.causal_conv1d_fn_cpu is windrow.vllm.causal_conv1d_fn_cpu
    module.causal_conv1d_fn = on_the_cpu
    windrow.vllm.register()
    assert module.causal_conv1d_fn is windrow.vllm.causal_conv1d_fn_cpu


@pytest.mark.parametrize("name", windrow.sglang._MODULES)
def test_what_is_not_known_of_sglang_stays(monkeypatch, name):
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)

    def of_the_past(x, conv_state, last_steps=None, **kwargs): ...
    def known(x, conv_states, seq_lens_cpu, validate_data=False, block_table=None, **kwargs): ...

    module.causal_conv1d_update, module.causal_conv1d_fn = of_the_past, known
    windrow.sglang.install()
    windrow.sglang.install()
    assert module.causal_conv1d_update is of_the_past
    assert module.causal_conv1d_fn is windrow.sglang.causal_conv1d_fn
    del module.causal_conv1d_fn
    windrow.sglang.install()


def test_importing_needs_no_engine():
    assert importlib.util.find_spec("windrow.vllm") and importlib.util.find_spec("windrow.sglang")
    assert "vllm" not in sys.modules and "sglang" not in sys.modules


@pytest.mark.parametrize("module", ["windrow.vllm", "windrow.sglang", "windrow.torch"])
def test_each_module_uses_the_threads_of_pytorch(module):
    program = f"""
import pathlib, torch
from windrow import _native
given = []
_native.use_openmp = given.append
import {module}
brought = [*(pathlib.Path(torch.__file__).parent / "lib").glob("libgomp*.so*")]
assert len(given) == (len(brought) == 1), (given, brought)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
