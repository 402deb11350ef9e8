"""Decisions: listed, set, forgotten, and kept on disk."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
import windrow.torch
from common import OURS, THEIRS, leaf
from torch import nn
from windrow.torch import DecisionsWarning, conv2d, decide, decisions, forget, optimize, patch
from windrow.torch._remembering import forget_all
from windrow.torch.choice import disk, measure, store
from windrow.torch.choice.candidates import Windrow
from windrow.torch.choice.policy import PYTORCH, Seconds

pytestmark = pytest.mark.usefixtures("nothing_decided")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where decisions are kept."""
    monkeypatch.delenv("WINDROW_DECISIONS")
    monkeypatch.setenv("WINDROW_TUNE_CACHE", str(tmp_path / "tuning"))
    disk.reset()
    yield tmp_path / "tuning"
    disk.reset()


def next_process():
    disk.flush()
    store.clear()
    disk.reset()
    forget_all()


def file_of(folder):
    (file,) = folder.glob("decisions-*.json")
    return file


def patched(*convolutions):
    model = nn.Sequential(*convolutions).eval()
    return patch(model).model


def called(model, x):
    with torch.no_grad():
        return model(x)


X = (1, 8, 12, 12)


def test_decisions_are_listed(times):
    times(OURS)
    assert len(decisions()) == 0 and str(decisions()).startswith("choice")
    called(patched(nn.Conv2d(8, 8, 3, padding=1, bias=False)), leaf(*X, grad=False))
    (decision,) = decisions()
    threads = torch.get_num_threads()
    filter = "filter [8, 8, 3, 3], padding 1, no bias"
    assert decision.problem.startswith(f"forward of float32 [1, 8, 12, 12], {filter}, {threads} thread")
    assert (decision.device, decision.choice, decision.in_graph) == ("cpu", "Windrow", "Windrow")
    assert decision.microseconds == pytest.approx({PYTORCH: 1e6, "Windrow": 5e5})
    assert decision.is_final and decision.source == "measured" and "Windrow 500 ms" in decision.reason
    called(patched(nn.Conv2d(8, 16, 3, groups=4, stride=(2, 1))), leaf(*X, grad=False))
    called(optimize(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()), check=False), leaf(*X, grad=False))
    lines = str(decisions()).splitlines()
    assert max(map(len, lines)) <= 100 and sum("measured" in line for line in lines) == 3
    text = " ".join(d.problem for d in decisions())
    assert "stride [2, 1]" in text and "groups 4" in text and "relu" in text


def test_problems_are_told_apart_in_words(times):
    times(OURS)
    weight = nn.Parameter(torch.randn(8, 8, 3, 3), requires_grad=False)
    x = leaf(*X, grad=False)
    turned = lambda t: t.contiguous(memory_format=torch.channels_last)
    bias = torch.ones(8)
    for how in (
        lambda: conv2d(x, weight, algorithm="fastest"),
        lambda: conv2d(turned(x), weight, algorithm="fastest"),
        lambda: conv2d(x, nn.Parameter(turned(weight), requires_grad=False), algorithm="fastest"),
        lambda: conv2d(x.transpose(2, 3), weight, algorithm="fastest"),
        lambda: conv2d(x, weight, bias, algorithm="fastest"),
        lambda: conv2d(x, weight, padding=1, algorithm="fastest"),
        lambda: conv2d(x, weight, dilation=2, algorithm="fastest"),
        lambda: conv2d(x, weight, activation="relu", algorithm="fastest"),
        lambda: conv2d(x, weight, accuracy="exact", algorithm="fastest"),
        lambda: conv2d(x, weight, frozen=True, algorithm="fastest"),
        lambda: windrow.torch.conv_transpose2d(x, weight, algorithm="fastest"),
        lambda: windrow.torch.conv_transpose2d(x, weight, stride=2, output_padding=1, algorithm="fastest"),
    ):
        before = len(decisions())
        how()
        assert len(decisions()) == before + 1
    assert len({d.problem for d in decisions()}) == len(decisions())


def test_a_second_process_times_nothing(folder, times):
    measured = times(OURS)
    plain = [nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)]
    x = leaf(*X, grad=False)
    want = called(nn.Sequential(*plain), x)
    for _ in range(2):
        model = patched(*[nn.Conv2d(c.in_channels, c.out_channels, c.kernel_size, padding=c.padding) for c in plain])
        model.load_state_dict(nn.Sequential(*plain).state_dict())
        torch.testing.assert_close(called(model, x), want, atol=1e-5, rtol=1e-5)
        fused = optimize(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()), check=False)
        called(fused, x)
        model(leaf(*X)).sum().backward()
        assert len(measured) == 9 and {d.choice for d in decisions()} <= {"Windrow", "Windrow, packing on each call"}
        assert all(d.is_final for d in decisions())
        next_process()
    called(patched(*plain), x)
    assert {d.source for d in decisions()} == {"stored"} and decisions()[0].microseconds[PYTORCH] == 1e6


PROGRAM = """
import torch, windrow.torch
from windrow.torch.choice import measure
from windrow.torch.choice.policy import Seconds
measured = []
measure.times_of = lambda device, runs: measured.append(1) or {n: Seconds(1.0 + (n == "PyTorch")) for n in runs}
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Conv2d(8, 8, size) for size in range(1, 6)])
windrow.torch.patch(model)
for _ in range(3):
    y = model(torch.ones(1, 8, 20, 20))
assert y.requires_grad and len(windrow.torch.decisions()) == 5
print(len(measured))
"""


def test_processes_share_a_file(tmp_path):
    file = tmp_path / "with" / "model.json"
    environment = {**os.environ, "WINDROW_DECISIONS": str(file), "OMP_NUM_THREADS": "1"}
    start = lambda: subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True)
    counted = lambda process: int(process.communicate(timeout=300)[0])
    # Both at once.
    assert sum(map(counted, [start(), start()])) >= 5
    (table,) = json.loads(file.read_text())["tables"]
    assert len(table["entries"]) == 5
    assert counted(start()) == 0


def test_results_are_compared_in_each_process(folder, times, monkeypatch):
    """One that is refused is kept as refused."""
    measured = times(OURS)
    x, convolution = leaf(*X, grad=False), nn.Conv2d(8, 8, 5)
    called(patched(convolution), x)
    next_process()
    straight = Windrow.straight

    def wrong(self, x, residual=None):
        run = straight(self, x, residual)
        return lambda: run() + 1

    with monkeypatch.context() as m:
        m.setattr(Windrow, "straight", wrong)
        windrow.torch.unpatch(model := nn.Sequential(convolution))
        want = called(model, x)
        torch.testing.assert_close(called(patched(convolution), x), want)
        (decision,) = decisions()
        assert decision.choice == PYTORCH and "differs from PyTorch by" in decision.reason
    next_process()
    windrow.torch.unpatch(model)
    called(patched(convolution), x)
    (decision,) = decisions()
    assert decision.choice == PYTORCH and decision.is_final and "differs from PyTorch by" in decision.reason
    assert decision.source == "stored" and len(measured) == 1


def test_provisional_decisions_are_not_kept(folder, monkeypatch):
    disturbed = lambda device, runs: {name: Seconds(1.0, is_disturbed=True) for name in runs}
    monkeypatch.setattr(measure, "times_of", disturbed)
    x, weight = leaf(*X, grad=False), nn.Parameter(torch.randn(8, 8, 3, 3), requires_grad=False)
    conv2d(x, weight, algorithm="fastest")
    disk.flush()
    assert not decisions()[0].is_final and not [*folder.glob("*.json")]
    for _ in range(2):
        conv2d(x, weight, algorithm="fastest")
    disk.flush()
    # Final for this process.
    assert decisions()[0].is_final and not [*folder.glob("*.json")]


def test_sizes_follow_those_of_an_earlier_process(folder, times):
    measured = times(THEIRS)
    weight = nn.Parameter(torch.randn(4, 3, 3, 3), requires_grad=False)
    of_size = lambda size: conv2d(leaf(1, 3, size, size, grad=False), weight, algorithm="fastest")
    for size in range(10, 18):
        of_size(size)
    next_process()
    of_size(18)
    assert len(measured) == 8 and decisions()[0].reason == "as for [1, 3, 17, 17]"
    of_size(40)
    assert len(measured) == 9


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda text: text[:-20], "ignored: "),
        (lambda text: "[]", "no 'windrow decisions 1'"),
        (lambda text: text.replace("decisions 1", "decisions 2"), "no 'windrow decisions 1'"),
        (lambda text: text.replace('"windrow": "', '"windrow": "0.0.'), "it is for .*'windrow': '0.0."),
        (lambda text: text.replace('"torch": "', '"torch": "1.'), "it is for .*'torch': '1."),
        (lambda text: text.replace('"device": "', '"device": "another '), "it is for .*another"),
        (lambda text: text.replace('"Windrow"', '"Nobody"'), "is no decision"),
        (lambda text: text.replace("[1, 8, 12, 12]", "twelve"), "is no decision"),
        (lambda text: text.replace("500000.0", "NaN"), "is no decision"),
        (lambda text: '{"format": "windrow decisions 1", "tables": [3]}', "ignored: "),
        (lambda text: "[" * 100_000, "ignored: "),
    ],
)  # fmt: skip
def test_damaged_and_foreign_files_are_ignored_and_replaced(folder, times, damage, why):
    measured = times(OURS)
    x, weight = leaf(*X, grad=False), leaf(8, 8, 3, 3, grad=False)
    conv2d(x, weight, algorithm="fastest")
    next_process()
    file = file_of(folder)
    text = file.read_text()
    file.write_text(damage(text))
    with pytest.warns(DecisionsWarning, match=why) as given:
        conv2d(x, weight, algorithm="fastest")
    assert len(measured) == 2 and len(given) == 1 and str(file) in str(given[0].message)
    next_process()
    conv2d(x, weight, algorithm="fastest")
    assert len(measured) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes with names")
def test_what_is_no_file_is_ignored(folder, times):
    measured = times(OURS)
    x, weight = leaf(*X, grad=False), leaf(8, 8, 3, 3, grad=False)
    folder.mkdir()
    conv2d(x, weight, algorithm="fastest")
    file = file_of(folder)
    for make in (os.mkfifo, os.mkdir):
        next_process()
        file.unlink()
        make(file)
        with pytest.warns(DecisionsWarning) as given:
            conv2d(x, weight, algorithm="fastest")
        assert "no regular file" in str(given[0].message)
        # A pipe is replaced.
        assert file.is_file() == (make is os.mkfifo) == (len(given) == 1)
    assert len(measured) == 3


def test_a_folder_that_cannot_be_written(folder, times):
    times(OURS)
    folder.write_text("a file")
    x, weight = leaf(*X, grad=False), leaf(8, 8, 3, 3, grad=False)
    with pytest.warns(DecisionsWarning, match="not written") as given:
        for size in (12, 13, 14):
            conv2d(leaf(1, 8, size, size, grad=False), weight, algorithm="fastest")
        disk.flush()
    assert len(given) == 1 and len(decisions()) == 3
    torch.testing.assert_close(conv2d(x, weight, algorithm="fastest"), F.conv2d(x, weight), atol=1e-4, rtol=1e-4)


def test_a_file_to_ship_with_a_model(tmp_path, times, monkeypatch):
    """Tables of other machines stay in it."""
    measured = times(OURS)
    file = tmp_path / "model.json"
    monkeypatch.setenv("WINDROW_DECISIONS", str(file))
    disk.reset()
    x, weight = leaf(*X, grad=False), leaf(8, 8, 3, 3, grad=False)
    conv2d(x, weight, algorithm="fastest")
    next_process()
    other = json.loads(file.read_text())
    other["tables"][0]["environment"]["device"] = "another"
    file.write_text(json.dumps(other))
    with pytest.warns(DecisionsWarning, match="another"):
        conv2d(x, weight, algorithm="fastest")
    next_process()
    assert [table["environment"]["device"] == "another" for table in json.loads(file.read_text())["tables"]] == [True, False]
    conv2d(x, weight, algorithm="fastest")
    assert len(measured) == 2
    monkeypatch.setenv("WINDROW_DECISIONS", "off")
    next_process()
    conv2d(x, weight, algorithm="fastest")
    assert len(measured) == 3
    disk.reset()


def test_threads_and_processes_that_write_at_once_lose_nothing(folder, times):
    times(OURS)
    weight, bias = nn.Parameter(torch.randn(8, 8, 3, 3), requires_grad=False), torch.ones(8)
    conv2d(leaf(*X, grad=False), weight, bias, algorithm="fastest")
    (decision,) = decisions()
    disk.flush()

    def write(number):
        key = decision.key._replace(sizes=(torch.Size([1, 8, 100 + number, 100]), decision.key.sizes[1]))
        for table in [*disk._tables.values()]:
            new = {disk._group(decision.what, key): {disk._sizes(key): next(iter([*table.entries.values()][0].values()))}}
            disk._write(disk._Table(table.path, table.environment, {}, new))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (table,) = json.loads(file_of(folder).read_text())["tables"]
    assert sum(map(len, table["entries"].values())) == 9
    assert {p.suffix for p in folder.iterdir()} == {".json", ".lock"}


def test_forgetting(folder, times):
    measured = times(OURS)
    model, x = patched(nn.Conv2d(8, 8, 3)), leaf(*X, grad=False)
    for _ in range(3):
        called(model, x)
    assert len(measured) == 1
    forget()
    assert not decisions()
    called(model, x)
    assert len(measured) == 2
    forget()
    next_process()
    called(model, x)
    assert len(measured) == 3


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_decision_by_hand(folder, times, is_fused, monkeypatch):
    measured = times(OURS)
    plain, x = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()).eval(), leaf(*X, grad=False)
    want = called(plain, x)
    model = optimize(plain, check=False) if is_fused else patched(nn.Conv2d(8, 8, 3), nn.ReLU())
    model.load_state_dict(plain.state_dict())
    for _ in range(2):
        called(model, x)
    by_windrow = []
    computed = windrow._native.conv2d
    asked = lambda *of, **how: by_windrow.append(how.get("algorithm")) or computed(*of, **how)
    monkeypatch.setattr(windrow._native, "conv2d", asked)
    for who, choice in (("pytorch", PYTORCH), ("im2col_gemm", "Windrow"), ("windrow", "Windrow"), ("direct", "Windrow")):
        (decision,) = decisions()
        decide(decision if who == "pytorch" else decision.problem, who)
        by_windrow.clear()
        for _ in range(3):
            torch.testing.assert_close(called(model, x), want, atol=1e-5, rtol=1e-5)
        (decision,) = decisions()
        assert decision.choice == choice and decision.source == "set by the user" and decision.is_final
        assert decision.reason == f"set to {who}" and len(measured) == 1
        assert {*by_windrow} == ({who} if who in ("im2col_gemm", "direct") else set())
    next_process()
    torch.testing.assert_close(called(model, x), want, atol=1e-5, rtol=1e-5)
    assert decisions()[0].source == "set by the user" and len(measured) == 1


def test_what_cannot_be_set(times):
    times(OURS)
    model = patched(nn.Conv2d(8, 8, 1), nn.ConvTranspose2d(8, 4, 2, stride=2))
    x = leaf(*X)
    for _ in range(2):
        model(x).sum().backward()
    before = decisions()
    with pytest.raises(windrow.torch.UnknownProblemError, match="'a problem' is no problem that"):
        decide("a problem", "pytorch")
    for decision in before:
        with pytest.raises(windrow.torch.UnknownAlgorithmError, match='`algorithm` is guess, expected .*"pytorch" or "win'):
            decide(decision, "guess")
        with pytest.raises(windrow.torch.UnsupportedAlgorithmError):
            decide(decision, "winograd_gemm_f2")
    assert decisions() == before
    for decision in before:
        decide(decision, "windrow")
        decide(decision, "pytorch")
    model(x).sum().backward()
    assert {d.choice for d in decisions()} == {PYTORCH}


def test_a_wrong_result_is_refused_whoever_wants_it(times, monkeypatch):
    times(THEIRS)
    model, x = patched(nn.Conv2d(8, 8, 3)), leaf(*X, grad=False)
    want = called(model, x)
    straight = Windrow.straight
    monkeypatch.setattr(Windrow, "straight", lambda *of: lambda: straight(*of)() + 1)
    decide(decisions()[0], "windrow")
    torch.testing.assert_close(called(model, x), want)
    (decision,) = decisions()
    assert decision.choice == PYTORCH and decision.is_final and "differs from PyTorch by" in decision.reason
