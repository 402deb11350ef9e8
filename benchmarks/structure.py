"""What the code is made of at some commits: lines by folder, who knows a backend, repetitions, circles.

    python benchmarks/structure.py OUT.json COMMIT...

Lines are those of Rust and of the Python package that are neither tests, examples, empty nor comments. What imports a
backend, or names `Device::Cuda` or a chip, is counted outside of the backends' folders. Repeated lines are part of
six or more in a row that stand somewhere else as well. Circles are top modules of the library that import each other.
"Same function" are the files of what there was at bca828e around the kernels.
Writes OUT.json and, as a table, OUT.md.
"""

import collections
import re
import subprocess
import sys
from pathlib import Path

import provenance

RUN = 6
LIBRARY = "crates/windrow/src/"
BACKENDS = (LIBRARY + "cuda", LIBRARY + "hip")
ROOMS = LIBRARY + r"(gelu|conv2d|causal_conv1d)/"
# Code of what there was at bca828e, in whatever files it is: what stands around the kernels.
SAME = {
    "plans and tuning, in the rooms": ROOMS
    + r"(plan/.*|tuning/.*|(mod|plan|engine|args|spec|tuning|update|backward)\.rs)",
    "plans and tuning, shared": LIBRARY + r"(plan|tuning)(/|\.rs)",
    "devices": LIBRARY + r"(cuda|gpu)/",
    "the command's run, bench and tune": r"crates/windrow-cli/src/(run|bench|tune)(/|\.rs)",
    "candle": r"crates/windrow-candle/src/",
    "the extension of Python": r"crates/windrow-python/src/",
}
# Files of what came since: filters that are right by content, memory that several streams and graphs share, reports of
# wrong indices, products for chips without a library; from Python serving, verification, transposed convolutions.
SINCE = re.compile(
    r"/plan/(cache|checksum)\.rs$|/gpu/(capture|shared|wrong_index|block_product)\.rs$"
    r"|/windrow-python/src/(causal_conv1d_serving|verify|conv2d_gradients)\.rs$"
)

def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def code(text: str) -> list[str]:
    """Lines without comments, attributes and what only tests compile."""
    kept: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if re.match(r"\s*#\[cfg\((all\()?test\b", line):
            indent = line[: len(line) - len(line.lstrip())]
            line = next(line for line in lines if not line.lstrip().startswith("#["))
            while not line.endswith((";", ",")) and not line.startswith(indent + "}"):
                line = next(lines)
                # Inside of a block only its end counts.
                line = line if line.startswith(indent + "}") else ""
            continue
        if (stripped := line.strip()) and not stripped.startswith(("//", "#[", "#![", "# ")):
            kept.append(stripped)
    return kept


def is_counted(path: str) -> bool:
    if re.search(r"(^|/)(tests|examples|fuzz)/|tests\.rs$", path):
        return False
    return path.endswith(".rs") or (path.endswith(".py") and path.startswith("crates/windrow-python/python/"))


def repeated(files: dict[str, list[str]]) -> int:
    places = collections.defaultdict(list)
    for path, lines in files.items():
        for start in range(len(lines) - RUN + 1):
            run = tuple(lines[start : start + RUN])
            if sum(bool(re.search(r"\w", line)) for line in run) >= RUN - 1:
                places[run].append((path, start))
    found = {
        (path, start + i)
        for of_run in places.values()
        if len(of_run) > 1
        for path, start in of_run
        for i in range(RUN)
    }
    return len(found)


def circles(files: dict[str, list[str]]) -> list[list[str]]:
    """Sets of the library's top modules of which each imports each, if by way of others."""
    uses: dict[str, set[str]] = collections.defaultdict(set)
    for path, lines in files.items():
        if path.startswith(LIBRARY) and path != LIBRARY + "lib.rs":
            module = path.removeprefix(LIBRARY).removesuffix(".rs").split("/")[0]
            for line in lines:
                uses[module].update(re.findall(r"\bcrate::([a-z]\w*)", line))
    modules = set(uses)
    reached = {}
    for module in modules:
        reached[module], left = set(), [module]
        while left:
            new = (uses[left.pop()] & modules) - reached[module]
            reached[module] |= new
            left += new
    groups = {frozenset(o for o in reached[m] if m in reached[o]) | {m} for m in modules}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def measured(commit: str) -> dict:
    paths = [path for path in git("ls-tree", "-r", "--name-only", commit).split() if is_counted(path)]
    files = {path: code(git("show", f"{commit}:{path}")) for path in paths}
    folders = collections.Counter()
    for path, lines in files.items():
        crate, *inside = path.removeprefix("crates/").split("/src/")
        room = inside[0].split("/")[0] if crate == "windrow" and inside and "/" in inside[0] else ""
        folders[f"{crate.split('/')[0]}/{room}".rstrip("/")] += len(lines)
    outside = {path: lines for path, lines in files.items() if not path.startswith(BACKENDS)}
    library = {path: lines for path, lines in outside.items() if path.startswith(LIBRARY)}

    def places(of: dict[str, list[str]], pattern: str) -> int:
        return sum(len(re.findall(pattern, line)) for lines in of.values() for line in lines)

    def same(pattern: str) -> int:
        return sum(len(l) for path, l in files.items() if re.match(pattern, path) and not SINCE.search(path))

    return {
        "commit": git("rev-parse", commit).strip(),
        "lines": sum(map(len, files.values())),
        "folders": dict(sorted(folders.items())),
        "same": {name: same(pattern) for name, pattern in SAME.items()},
        "files of the library that import a backend": sum(
            any(re.search(r"\bcrate::(cuda|hip)\b", line) for line in lines) for lines in library.values()
        ),
        "places of the library that name Device::Cuda": places(library, r"\bDevice::Cuda\b"),
        "places of the library that name a chip": places(library, r"compute_capability *[=<>!]|\"gfx\d"),
        "repeated lines": repeated(files),
        "circles": circles(files),
    }


def table(commits: list[dict]) -> str:
    rows = [["", *(c["commit"][:7] for c in commits)]]
    rows += [[key, *(f"{c[key]:,}" for c in commits)] for key in commits[0] if isinstance(commits[0][key], int)]
    rows += [["circles", *("; ".join(" ".join(g) for g in c["circles"]) or "none" for c in commits)]]
    rows += [[f"same function: {key}", *(f"{c['same'][key]:,}" for c in commits)] for key in SAME]
    rows += [["same function: sum", *(f"{sum(c['same'].values()):,}" for c in commits)]]
    folders = sorted({folder for c in commits for folder in c["folders"]})
    rows += [[f"lines of {folder}", *(f"{c['folders'].get(folder, 0):,}" for c in commits)] for folder in folders]
    rows.insert(1, ["---", *("--:" for _ in commits)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(out: str, *commits: str) -> None:
    of = [measured(commit) for commit in commits]
    path = Path(out)
    provenance.write(path, {"commit": of[-1]["commit"], "clean": True, "commits": of})
    path.with_suffix(".md").write_text(f"# Structure\n\n`python benchmarks/structure.py`\n\n{table(of)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
