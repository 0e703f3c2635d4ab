"""The table of `penstock bench gpu` says what was measured, what it is compared with, and what is missing."""

import sys

import pytest

from bench.rig.children import ChildError, ask
from bench.rig.engines import Measured
from bench.rig.served import Load, pipeline_phases, pipeline_ports
from bench.rig.table import latency_lines, notes, row_line
from bench.rig.work import Ceilings, make_work

WORK = make_work("decode32")
FOUND = {
    "process": Measured("one process", {"first_s": 5.0}, {"decode32": [0.33, 0.32]}),
    "pipeline": Measured(
        "pipeline", {"first_s": 7.0}, {"decode32": [0.4, 0.41]}, {"decode32": Load(0.4, 8.0, 1.5, 1.0)}
    ),
    "peer": Measured("peer", {"first_s": 50.0}, {"decode32": [0.64, 0.7]}),
}


def test_rates_and_ratios_of_the_pipeline_stand_in_a_row() -> None:
    line = row_line("0.6b", WORK, FOUND, Ceilings("", 4e12, 8e14))
    for part in ("25,600", "20,480", "12,800", "0.800 (0.97)", "1.600 (1.5)"):
        assert part in line


def test_what_was_not_measured_is_a_dash() -> None:
    line = row_line("0.6b", WORK, {"pipeline": FOUND["pipeline"]}, None)
    assert line.count("–") == 6
    assert "20,480" in line


def test_what_clients_waited_stands_beside_what_the_peers_did() -> None:
    work = make_work("rate")
    found = {
        "pipeline": Measured("", loads={"rate": Load(40.0, 45.0, 8.0, 1.0, itl_p99_ms=20.0)}),
        "peer": Measured("", loads={"rate": Load(40.0, 50.0, 10.0, 1.0, itl_p99_ms=40.0)}),
    }
    lines = "\n".join(latency_lines("8b-text", work, found))
    for part in ("45.00      50.00  0.900 (0.9)", "8.00      10.00  0.800 (0.9)", "20.00      40.00  0.500 (1)"):
        assert part in lines
    assert latency_lines("0.6b", WORK, FOUND) == []
    assert latency_lines("8b-text", work, {})[0].count("–") == 3


def test_notes_tell_starts_rounds_and_latencies() -> None:
    found = notes(FOUND)
    assert "decode32, peer: rounds of 0.6400, 0.7000 s" in found
    assert "start, pipeline: first token 7.0 s" in found
    assert any("time to first token 8.00 ms, 1.500 ms a token" in line for line in found)


def test_what_was_measured_survives_a_file() -> None:
    assert Measured.from_json(FOUND["pipeline"].as_json()) == FOUND["pipeline"]


def test_a_pipeline_is_ready_when_it_invites() -> None:
    gateways = "  OpenAI HTTP  http://127.0.0.1:81/v1\n  OpenAI HTTP  http://127.0.0.1:82/v1\n"
    assert pipeline_ports(gateways) == []
    assert pipeline_ports(gateways + "  penstock status --watch\n") == [81, 82]
    said = "   worker-0 | 12:59:46 [info] weights loaded gigabytes=1.2 seconds=0.16\n"
    said += "   worker-0 | 12:59:47 [info] attention chosen   attention=triton reason='no package suits' seconds=2.5\n"
    assert pipeline_phases(said) == {"weights loaded": 0.16, "attention chosen": 2.5}


def test_answers_of_a_child_that_fails_are_kept() -> None:
    program = "from bench.rig.children import answer; import sys; answer(row='a'); sys.exit('broken')"
    with pytest.raises(ChildError, match=r"ended with 1: .*broken") as caught:
        ask([sys.executable, "-c", program], {}, 300.0)
    assert caught.value.answers == [{"row": "a"}]


def test_a_child_that_takes_too_long_is_ended() -> None:
    with pytest.raises(ChildError, match="ended with -9"):
        ask([sys.executable, "-c", "import time; time.sleep(600)"], {}, 0.2)
