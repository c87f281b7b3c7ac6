# SPDX-License-Identifier: Apache-2.0
"""Results compared: which cases match, what is noise, what is a regression; files that are none; another commit."""

import copy
import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from lightning_indexer import cli
from lightning_indexer.bench import baseline, checkout
from lightning_indexer.bench.baseline import Compared, against_commit, compare_rounds, comparison_table, measured_arguments
from lightning_indexer.bench.results import case_name, identity, load_result, parse_result

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
DECODE = RESULTS / "decode-h200-2026-11-30.json"


def told(*times: float, spread: float = 0.0, device: str = "NVIDIA H200") -> dict:
    rows = [
        {"op": "decode", "format": "bf16", "heads": 1, "batch": 1, "context": 1024 * (number + 1), "query_len": 1, "us": us}
        | {
            "us_min": us * (1 - spread / 2),
            "us_max": us * (1 + spread / 2),
            "bytes": 1,
            "flops": 1,
            "pct_roof": 9.0,
            "layers": 57,
        }
        for number, us in enumerate(times)
    ]
    facts = {"device": device, "driver": "1", "torch": "2", "triton": "3", "commit": "abc", "date": "2026-11-30"}
    return {**facts, "read_roof_TBps": 4.6, "matrix_roof_TFLOPs": 780.0, "rows": rows, "failures": []}


def result(*times: float, **other):
    return parse_result(told(*times, **other), "a result")


def commit_all(folder: Path) -> str:
    """Make a repository of a folder, with one commit of all that is in it; its hash."""
    git = ("git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def verdicts(*pairs) -> list[str]:
    return [case.verdict for case in compare_rounds(pairs, "before").cases]


def test_one_percent_is_the_same():
    assert verdicts((result(100.0, 100.0, 100.0), result(100.9, 101.1, 98.9))) == ["same", "slower", "faster"]


def test_spread_of_the_replays_is_noise():
    """A range of 40 % on both sides: noise is sqrt(2) * 0.075 * 0.4 = 4.2 %, so up to 12.7 % tell nothing."""
    pair = result(100.0, 100.0, spread=0.4), result(112.0, 114.0, spread=0.4)
    found = compare_rounds([pair], "before")
    assert [case.noise for case in found.cases] == pytest.approx([0.0424264, 0.0424264])
    assert [case.verdict for case in found.cases] == ["same", "slower"]


def test_rounds_are_paired():
    """A machine that slows down for both is no regression; ratios that disagree are noise."""
    drifting = [(result(100.0), result(100.5)), (result(150.0), result(151.0)), (result(200.0), result(201.0))]
    assert verdicts(*drifting) == ["same"]
    constant = [(result(100.0), result(103.0)), (result(150.0), result(154.5)), (result(200.0), result(206.2))]
    assert verdicts(*constant) == ["slower"]
    wild = [(result(100.0), result(90.0)), (result(100.0), result(103.0)), (result(100.0), result(112.0))]
    found = compare_rounds(wild, "before").cases[0]
    assert (found.ratio, found.verdict) == (pytest.approx(1.03), "same")
    assert found.noise == pytest.approx(0.22 / 2 / 3**0.5)


def test_cases_match_by_what_they_are_not_by_what_they_measured():
    base, ours = told(100.0, 200.0), told(100.0, 300.0)
    ours["rows"][1] |= {"query_len": 4}
    found = compare_rounds([(parse_result(base, "b"), parse_result(ours, "o"))], "b")
    assert [case.name for case in found.cases] == ["decode, 1 x 1,024, Q 1, bf16"]
    assert found.only_ours == ["decode, 1 x 2,048, Q 4, bf16"]
    assert found.only_base == ["decode, 1 x 2,048, Q 1, bf16"]
    uneven = told(1.0)["rows"][0] | {"lengths": [[1, 1024], [2, 512]]}
    assert identity(uneven) != identity(told(1.0)["rows"][0])
    assert case_name(uneven) == "decode, 1 x 1,024 + 2 x 512, Q 1, bf16"


def test_another_device_and_nothing_in_common_are_refused():
    with pytest.raises(ValueError, match="baseline: expected a result of NVIDIA H200, got one of AMD"):
        compare_rounds([(result(1.0, device="AMD"), result(1.0))], "before")
    with pytest.raises(ValueError, match="baseline: expected a result with cases in common, got none in before"):
        compare_rounds([(result(), result(1.0))], "before")


def test_rows_without_a_range_are_compared_in_turns_only():
    rows = [{"op": "exchange", "world": 4, "rows": 1, "transport": "peer", "us": us} for us in (5.0, 6.0)]
    pair = [parse_result({**told(1.0), "rows": [*told(1.0)["rows"], row]}, "r") for row in rows]
    assert len(compare_rounds([tuple(pair)], "b").cases) == 1
    assert [case.name for case in compare_rounds([tuple(pair)] * 2, "b").cases][1] == "exchange, peer, 4 ranks, 1 rows"


def test_kept_results_of_one_commit_show_no_regression():
    found = compare_rounds([(load_result(DECODE), load_result(RESULTS / "cp-h200-2026-11-30.json"))], "before")
    assert len(found.cases) == 8
    assert {case.verdict for case in found.cases} == {"same"}


def test_kept_results_of_two_days_show_what_became_faster():
    found = compare_rounds([(load_result(RESULTS / "decode-h200-2026-11-29.json"), load_result(DECODE))], "before")
    assert found.slower == []
    assert sum(case.verdict == "faster" for case in found.cases) >= 20


def test_table_ends_with_the_verdict():
    found = compare_rounds([(result(100.0, 100.0), result(150.0, 100.0))], "before.json")
    lines = comparison_table(found).splitlines()
    assert lines[2].split() == [
        "decode,",
        "1",
        "x",
        "1,024,",
        "Q",
        "1,",
        "bf16",
        *["100.00", "150.00", "1.500", "0.00", "slower"],
    ]
    assert lines[-2] == "Against before.json: 1 slower, 1 same, 0 faster; geometric mean of the ratios 1.225."
    assert lines[-1] == "REGRESSION"
    assert found.as_json()["cases"][0]["verdict"] == "slower"


def test_turns_begin_with_the_baseline():
    asked = []

    def run(commit, arguments):
        asked.append((commit, list(arguments)))
        return result(100.0)

    def measure():
        asked.append("ours")
        return result(120.0)

    found = against_commit("abc", ["decode"], measure, 2, lambda *_: None, run)
    assert asked == [("abc", ["decode"]), "ours"] * 2
    assert found.cases == [Compared("decode, 1 x 1,024, Q 1, bf16", 100.0, 120.0, 1.2, 0.0)]


def test_what_is_measured_is_handed_on_and_where_to_write_is_not():
    given = ["decode", "--case", "1,4096,1", "--json", "a.json", "--quick", "--baseline=HEAD", "--force", "--rounds", "2"]
    assert measured_arguments(given) == ["decode", "--case", "1,4096,1", "--quick"]


def test_another_commit_runs_its_own_code(tmp_path, monkeypatch):
    """A repository whose only commit answers with a result of its own."""
    package = tmp_path / "src" / "lightning_indexer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    program = f"""
import json, sys
def main():
    told = {told(7.0)!r}
    told["commit"] = " ".join(sys.argv[1:])
    if "--fail" in sys.argv:
        sys.exit("Error: 'cuda' is no CUDA or HIP device that works here")
    open(sys.argv[-1], "w").write(json.dumps(told))
"""
    (package / "cli.py").write_text(program)
    commit_all(tmp_path)
    (package / "cli.py").write_text("raise SystemExit('the working tree was run')")
    monkeypatch.setattr(checkout, "PACKAGE", package)
    found = baseline.run_commit("HEAD", ["decode", "--quick"])
    assert found.facts["commit"].startswith("bench decode --quick --commit HEAD --json ")
    with pytest.raises(ValueError, match="baseline: expected a result of HEAD, got Error: 'cuda' is no CUDA or HIP device"):
        baseline.run_commit("HEAD", ["decode", "--fail"])
    with pytest.raises(ValueError, match="baseline: expected the sources of nowhere, got git: fatal: "):
        baseline.run_commit("nowhere", ["decode"])


def test_commits_are_those_of_the_checkout(tmp_path, monkeypatch):
    package = tmp_path / "src" / "lightning_indexer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(checkout, "PACKAGE", package)
    head = commit_all(tmp_path)
    assert (checkout.find_commit("HEAD"), checkout.find_commit(head[:8])) == (head, head)
    assert checkout.find_commit("nowhere") is None
    assert checkout.find_commit("--all") is None


def test_an_installed_copy_has_no_commits_of_the_repository_around_it(tmp_path, monkeypatch):
    package = tmp_path / ".venv" / "lib" / "python3.12" / "site-packages" / "lightning_indexer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(checkout, "PACKAGE", package)
    assert checkout.find_commit("HEAD") is None  # no repository
    commit_all(tmp_path)
    assert checkout.find_commit("HEAD") is None
    done = CliRunner().invoke(cli.main, ["bench", "decode", "--baseline", "HEAD"])
    message = "Error: baseline: expected a result file, or a commit of the checkout that this runs from, got 'HEAD'\n"
    assert (done.exit_code, done.output) == (2, message)


@pytest.mark.parametrize("missing", ["git", "tar"])
def test_a_tool_that_is_not_there(missing, tmp_path, monkeypatch):
    (tmp_path / "git").write_text("#!/bin/sh\n")
    (tmp_path / "git").chmod(0o755)
    if missing == "git":
        (tmp_path / "git").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=f"baseline: expected the sources of HEAD, got {missing}: No such file or directory"):
        baseline.run_commit("HEAD", ["decode"])


# files


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda told: told.pop("rows"), "expected a bench result with 'rows', got none"),
        (lambda told: told.pop("device"), "expected a bench result with 'device', got none"),
        (lambda told: told.update(read_roof_TBps=0), "expected read_roof_TBps > 0, got 0"),
        (lambda told: told.update(rows={}), "expected a list of rows, got dict"),
        (lambda told: told["rows"].append({"op": "decode"}), "expected rows with op and us, got row 1 {'op': 'decode'}"),
        (lambda told: told["rows"][0].update(us=float("nan")), "expected rows with op and us, got row 0 "),
    ],
)
def test_files_that_are_no_results(tmp_path, spoil, message):
    spoiled = copy.deepcopy(told(1.0))
    spoil(spoiled)
    (tmp_path / "r.json").write_text(json.dumps(spoiled))
    with pytest.raises(ValueError, match=r"r\.json: ") as error:
        load_result(tmp_path / "r.json")
    assert message in str(error.value)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b""])
def test_corrupt_baseline_is_one_line_before_anything_runs(tmp_path, content):
    (tmp_path / "r.json").write_bytes(content)
    done = CliRunner().invoke(cli.main, ["bench", "decode", "--baseline", str(tmp_path / "r.json")])
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1
    assert "r.json: expected the JSON of a bench result, got " in done.output


def test_unknown_baseline():
    done = CliRunner().invoke(cli.main, ["bench", "cp", "--baseline", "no-such-commit"])
    message = (
        "Error: baseline: expected a result file, or a commit of the checkout that this runs from, got 'no-such-commit'\n"
    )
    assert (done.exit_code, done.output) == (2, message)
