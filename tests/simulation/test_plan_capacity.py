"""Capacity planning with the real scheduler on the replicas, and its command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import plan_capacity
import pytest
from simulation.fleet import Played, Scaling, play
from simulation.planner import Planner
from simulation.records import Target
from simulation.replica import ReplicaConfig
from simulation.router import Router
from simulation.run import simulate
from simulation.sample import run_sample
from simulation.step_model import StepModel, read_step_model
from simulation.traces import TraceRequest, load_trace
from simulation.traffic import Traffic, superposed
from simulation.work import WorkModel
from support.step_models import one_us_a_token

from asyncengine.terms import Terms

SAMPLE = Path(__file__).parents[1] / "chaos" / "data" / "azure_conversation.csv"
FILE = read_step_model(Path(plan_capacity.__file__).parent / "step_models" / "h200-qwen3-0.6b.json")
MODEL = StepModel(FILE.coefficients)
CONFIG = ReplicaConfig(kv_cache_tokens=65536, max_model_len=8192)
S = 10**9


def played(traffic: Traffic, replicas: int) -> Played:
    work = WorkModel(MODEL, max_num_seqs=CONFIG.max_num_seqs, max_num_batched_tokens=CONFIG.max_num_batched_tokens)
    return play(traffic, Router(work, bound=2.0, block_tokens=512, cache_blocks=128), Scaling(replicas), first_ns=0)


def test_a_fleet_of_one_is_the_simulation_of_the_trace() -> None:
    trace = load_trace(str(SAMPLE), limit=40, length_scale=0.1)
    traffic = superposed(trace)
    sample = run_sample(traffic, played(traffic, 1), CONFIG, MODEL, count=8, seed=0)
    run = simulate(trace, CONFIG, MODEL)
    assert sample.replicas == [0]
    assert np.array_equal(sample.records.end, run.records.end)
    assert (sample.busy_ns, sample.done_ns) == (run.replica.busy_ns, [run.replica.now_ns])


def test_a_sample_of_all_replicas_has_every_request_once_and_each_where_it_was_sent() -> None:
    trace = load_trace(str(SAMPLE), limit=40, length_scale=0.1)
    traffic = superposed(trace, 3)
    fleet = played(traffic, 4)
    sample = run_sample(traffic, fleet, CONFIG, MODEL, count=8, seed=0)
    assert sample.replicas == [0, 1, 2, 3]
    assert sample.records.ran.all()
    expected = [traffic.at_ns[fleet.replica == replica] for replica in range(4)]
    assert np.array_equal(sample.records.arrival, np.concatenate(expected))
    alone = [int(traffic.source[at]) for at in np.flatnonzero(fleet.replica == 3)]
    assert sample.records.prompt_tokens[-len(alone) :].tolist() == [trace[at].prompt_tokens for at in alone]


def test_a_sample_is_drawn_from_small_and_large_alike_and_by_the_seed() -> None:
    traffic = superposed([TraceRequest(at, at * S, 100, 4) for at in range(60)])
    sizes = [1, 2, 3, 4, 20, 30]
    fleet = Played(np.repeat(np.arange(6, dtype=np.int32), sizes), [], [], 60 * S, 0)
    fleet.lives.extend(played(traffic, 8).lives)
    for seed in range(5):
        sample = run_sample(traffic, fleet, CONFIG, MODEL, count=3, seed=seed)
        assert [replica // 2 for replica in sample.replicas] == [0, 1, 2], (
            "one of each two; the last two had no request"
        )
        again = run_sample(traffic, fleet, CONFIG, MODEL, count=3, seed=seed)
        assert sample.replicas == again.replicas


def test_prompts_of_a_copy_begin_alike_on_its_replica_and_those_of_another_copy_do_not() -> None:
    trace = [TraceRequest(at, at * S, 1000, 4, blocks=(7, 8 + at)) for at in range(2)]
    own, shared = superposed(trace, 2, shift_s=0.0), superposed(trace, 2, shift_s=0.0, share=True)
    cached = [
        run_sample(traffic, played(traffic, 1), CONFIG, MODEL, count=1, seed=0).records.cached.tolist()
        for traffic in (own, shared)
    ]
    assert cached[0] == [0, 0, 512, 512]
    assert cached[1][2:] == [512, 992], "the copy's second prompt comes while the first is computed"


def test_with_background_requests_the_figures_are_of_interactive_ones_and_of_when_all_is_done() -> None:
    background = Terms(service_class="background")
    trace = [
        TraceRequest(0, 0, 16, 3),
        TraceRequest(1, 1 * S, 1024, 2, terms=background),
        TraceRequest(2, 2 * S, 1024, 2, first_id=2000, terms=background),
    ]
    planner = Planner(
        superposed(trace),
        CONFIG,
        one_us_a_token(host_us=0.0),
        scaling=Scaling(1),
        bound=2.0,
        good=Target(1.015, 1.0),
        sample=1,
        seed=0,
    )
    figures, _ = planner.figures(1)
    sampled = figures["sample"]
    assert sampled["ttft_ms"]["p50"] == sampled["ttft_ms"]["p99"] == 1.015
    assert sampled["tpot_ms"]["p99"] == sampled["gap_ms"]["p99"] == 1.0
    assert (sampled["requests"], sampled["good_share"]) == (3, 1.0)
    assert sampled["background_done_s"] == pytest.approx(0.003023)  # 2023 us of prompt, 1000 us of the second token
    assert figures["goodput_per_s"] == pytest.approx(1 / figures["seconds"])
    args = plan_capacity.parse([str(SAMPLE), "--background", "0.5", "--background-done-s", "0.003"])
    assert not plan_capacity.meets(sampled, args)
    args.background_done_s = 0.004
    assert plan_capacity.meets(sampled, args)


# ---------------------------------------------------------------------------------------------------------- command


def test_the_command_finds_the_fewest_replicas_and_says_what_it_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    arguments = [str(SAMPLE), "--requests", "40", "--scale-traffic", "15", "--length-scale", "0.1", "--sample", "1"]
    arguments += ["--max-model-len", "8192"]
    code = plan_capacity.main([*arguments, "--tpot-p99-ms", "5", "--json", str(out), "--png", str(picture)])
    assert code == 0
    content = json.loads(out.read_text())
    found, tries = content["found"], {each["most"]: each for each in content["tried"]}
    assert f"{found} replicas meet the targets" in capsys.readouterr().out
    assert tries[found]["met"]
    assert not tries[found - 1]["met"]
    assert tries[found]["sample"]["tpot_ms"]["p99"] <= 5 < tries[found - 1]["sample"]["tpot_ms"]["p99"]
    assert tries[found]["requests"] == 600
    assert tries[found]["gpu_hours"] == pytest.approx(found * tries[found]["seconds"] / 3600)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_trace_of_which_half_can_wait_takes_fewer_replicas_unless_it_may_not_wait_long(tmp_path: Path) -> None:
    arguments = [str(SAMPLE), "--requests", "40", "--scale-traffic", "15", "--length-scale", "0.2", "--sample", "1"]
    arguments += ["--max-model-len", "8192", "--max-num-seqs", "16", "--ttft-p99-ms", "100"]
    found = []
    for terms in ([], ["--background", "0.5"], ["--background", "0.5", "--background-done-s", "1"]):
        out = tmp_path / "plan.json"
        assert plan_capacity.main([*arguments, *terms, "--json", str(out)]) == 0
        found.append(json.loads(out.read_text())["found"])
    assert found == [2, 1, 2]


def test_a_reactive_fleet_takes_fewer_gpu_hours_than_the_most_that_it_may_have(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    arguments = [str(SAMPLE), "--requests", "150", "--scale-traffic", "30", "--shift-seconds", "0", "--sample", "1"]
    arguments += ["--length-scale", "0.1"]
    scaling = ["--scaling", "reactive", "--window-s", "2", "--hold-s", "4", "--cold-start-s", "1", "--replicas", "9"]
    plan_capacity.main([*arguments, *scaling, "--json", str(out)])
    content = json.loads(out.read_text())
    figures = content["tried"][0]
    assert figures["gpu_hours"] < 0.9 * 9 * figures["seconds"] / 3600
    assert figures["replicas_mean"] < figures["replicas_peak"] <= 9
    assert {moment["coming"] for moment in content["moments"]} != {0}


def test_a_fleet_may_have_thousands_of_replicas(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    arguments = [str(SAMPLE), "--requests", "20", "--scale-traffic", "2500", "--length-scale", "0.1", "--sample", "2"]
    assert plan_capacity.main([*arguments, "--replicas", "2000", "--max-model-len", "8192", "--json", str(out)]) == 0
    (figures,) = json.loads(out.read_text())["tried"]
    assert (figures["most"], figures["requests"]) == (2000, 50_000)
    assert figures["gpu_hours"] == pytest.approx(2000 * figures["seconds"] / 3600)
    assert figures["sample"]["good_share"] == 1.0


def test_the_command_says_when_no_fleet_meets_the_targets(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(SAMPLE), "--requests", "20", "--length-scale", "0.1", "--max-model-len", "8192"]
    arguments += ["--ttft-p99-ms", "0.001"]
    assert plan_capacity.main(arguments) == 1
    assert "32 replicas do not meet the targets" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.csv"], "No such file"),
        (["sharegpt"], "planning needs a trace with times"),
        ([str(SAMPLE), "--background", "1"], "must be at least 0 and below 1"),
        ([str(SAMPLE), "--good-share", "1.5"], "must be above 0 and at most 1"),
        ([str(SAMPLE), "--replicas", "0"], "must be at least 1"),
        ([str(SAMPLE), "--cold-start-s", "-1"], "must not be negative"),
        ([str(SAMPLE), "--max-num-batched-tokens", "8"], "must be at least --max-num-seqs"),
    ],
)
def test_the_command_refuses_what_it_cannot_plan_with(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        plan_capacity.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
