"""Tokens that models of transformers generate on the CPU, with the distribution windrow-causal-conv1d and without, in turns.

    python benchmarks/generation.py [--models mamba2 lfm2] [--prompt 256] [--tokens 48] [--rounds 5] [--record DIRECTORY]

Models have the sizes of published ones and random weights in f32. Each side is a process of its own, since transformers
looks for the package when a model is imported; in one of them the folder of the distribution is on the path as if it
were installed. Both get the same prompt and have to generate the same tokens. `prompt` is the time to the first token,
`tokens/s` the rate of those that follow; medians over the rounds. With --record the figures are written as
generation.json and .md; models measured one after the other at one commit add up to one record.
"""

import argparse
import json
import os
import pathlib
import platform
import site
import statistics
import subprocess
import sys
import time

import provenance

DISTRIBUTION = provenance.ROOT / "crates/windrow-python/causal-conv1d"
SIDES = ["windrow", "plain"]
# As mamba2-130m and LFM2-350M.
SIZES = {
    "mamba2": {
        "vocab_size": 50288,
        "hidden_size": 768,
        "num_hidden_layers": 24,
        "state_size": 128,
        "num_heads": 24,
        "head_dim": 64,
        "n_groups": 1,
    },
    "lfm2": {
        "vocab_size": 65536,
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "layer_types": [
            "full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)
        ],
    },
}


def work(side, name, prompt, tokens):
    """Generates once for each line that comes in."""
    if side == "windrow":
        site.addsitedir(str(DISTRIBUTION))
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES[name])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    found = "causal_conv1d" in sys.modules
    if found != (side == "windrow"):
        raise RuntimeError(f"{side}: causal_conv1d is {'' if found else 'not '}imported")
    text = torch.randint(3, 1000, (1, prompt))

    def generate(count):
        start = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                text, max_new_tokens=count, min_new_tokens=count, do_sample=False, use_cache=True, pad_token_id=0
            )
        return time.perf_counter() - start, out[0, prompt:].tolist()

    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps(versions), flush=True)
    for _ in sys.stdin:
        first, _ = generate(1)
        whole, generated = generate(tokens + 1)
        print(json.dumps({"first": first, "rest": whole - first, "generated": generated}), flush=True)


def measure(name, prompt, tokens, rounds):
    arguments = [name, str(prompt), str(tokens)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    workers = {
        side: subprocess.Popen([sys.executable, __file__, "--work", side, *arguments], **pipes, env=environment)
        for side in SIDES
    }
    versions = [json.loads(worker.stdout.readline()) for worker in workers.values()][0]
    results = {side: [] for side in SIDES}
    # The first round finds what is compiled or packed once.
    for _ in range(rounds + 1):
        for side, worker in workers.items():
            worker.stdin.write("\n")
            worker.stdin.flush()
            results[side].append(json.loads(worker.stdout.readline()))
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    generated = {tuple(result["generated"]) for side in SIDES for result in results[side]}
    row = {"model": name, "prompt": prompt, "tokens": tokens, "same_tokens": len(generated) == 1}
    for side in SIDES:
        timed = results[side][1:]
        row[f"{side}_prompt_ms"] = 1e3 * statistics.median(r["first"] for r in timed)
        row[f"{side}_tokens_per_s"] = tokens / statistics.median(r["rest"] for r in timed)
    return row, versions


def table(rows):
    lines = [
        "| model | prompt | ms | without | speed-up | tokens/s | without | speed-up | same tokens |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for r in rows:
        ms, plain_ms = r["windrow_prompt_ms"], r["plain_prompt_ms"]
        rate, plain_rate = r["windrow_tokens_per_s"], r["plain_tokens_per_s"]
        lines.append(
            f"| {r['model']} | {r['prompt']} | {ms:.0f} | {plain_ms:.0f} | {plain_ms / ms:.2f} "
            f"| {rate:.1f} | {plain_rate:.1f} | {rate / plain_rate:.2f} | {'yes' if r['same_tokens'] else 'no'} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=pathlib.Path, help="write generation.json and .md there")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        side, name, prompt, tokens = options.work
        work(side, name, int(prompt), int(tokens))
        return
    rows = []
    for name in options.models:
        row, versions = measure(name, options.prompt, options.tokens, options.rounds)
        rows.append(row)
    whole = provenance.commit() | {
        "machine": {"cpu": provenance.cpu(), "python": platform.python_version(), **versions},
        "rows": rows,
    }
    print(table(rows))
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
        file = options.record / "generation.json"
        earlier = json.loads(file.read_text()) if file.exists() else {"rows": []}
        if all(earlier.get(key) == whole[key] for key in ("commit", "clean", "machine")):
            whole["rows"] = [r for r in earlier["rows"] if r["model"] not in options.models] + rows
        provenance.write(file, whole)
        title = "# Generation on {cpu}, {threads} threads: transformers {transformers}, torch {torch}"
        text = f"{title.format(**whole['machine'])}\n\n{provenance.sentence()}\n\n" + table(whole["rows"])
        file.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
