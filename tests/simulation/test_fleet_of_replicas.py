"""A fleet without its engines: who gets which request, and when replicas come and go."""

from __future__ import annotations

import numpy as np
import pytest
from simulation.fleet import Autoscaler, Life, Moment, Scaling, play
from simulation.router import Router
from simulation.search import fewest
from simulation.step_model import Coefficients, StepModel
from simulation.traces import TraceRequest
from simulation.traffic import superposed
from simulation.work import WorkModel

S = 10**9
CACHE_BLOCKS = 100


def work_model(token_s: float = 0.5) -> WorkModel:
    """A token costs `token_s` seconds, of a prompt as of an answer: a request of one each 1 s."""
    model = StepModel(
        Coefficients(
            base_tokens=(1, 2),
            base_us=(1e6 * token_s, 2e6 * token_s),
            sampled_row_us=0.0,
            decode_context_us=0.0,
            prefill_pair_us=0.0,
            host_rows=(1, 2),
            host_us=(0.0, 0.0),
        )
    )
    return WorkModel(model, max_num_seqs=1, max_num_batched_tokens=1)


def router(replicas: int, *, bound: float = 1.0, cache_blocks: int = CACHE_BLOCKS) -> Router:
    """Blocks of 10 tokens, of which each costs 1 s."""
    result = Router(work_model(1.0), bound=bound, block_tokens=10, cache_blocks=cache_blocks)
    for replica in range(replicas):
        result.add(replica, 0)
    return result


def trace(times_s: list[float]) -> list[TraceRequest]:
    """Each is 1 s of work for `work_model()`."""
    return [TraceRequest(index, round(at * S), 1, 1) for index, at in enumerate(times_s)]


# ------------------------------------------------------------------------------------------------------------- work


def test_the_work_of_a_request_is_what_its_tokens_and_what_they_attend_to_cost() -> None:
    model = StepModel(
        Coefficients(
            base_tokens=(1, 100),
            base_us=(10.0, 208.0),  # 2 us a token and 8
            sampled_row_us=1.0,
            decode_context_us=0.5,
            prefill_pair_us=0.25,
            host_rows=(1, 2),
            host_us=(0.0, 0.0),
        )
    )
    work = WorkModel(model, max_num_seqs=8, max_num_batched_tokens=32)
    # a step of 32 tokens takes 72 us, 2.25 for each; one of 8 rows 24 and 8 samples, 4 for each
    prompt = 12 * 2.25 + 0.25 * 12 * 13 / 2
    answer = 4 * (4 + 0.5 * (12 + 2))
    assert work.ns(12, 4) == 1000 * (prompt + answer)
    assert work.ns(12, 4, cached=8) == 1000 * (4 * 2.25 + 0.25 * (12 * 13 - 8 * 9) / 2 + answer)


# ----------------------------------------------------------------------------------------------------------- router


def test_a_request_goes_to_the_replica_with_the_least_outstanding_work() -> None:
    fleet = router(3)
    sent = [fleet.route(0, prompt, 1) for prompt in (99, 9, 19, 9, 9, 9)]
    assert sent == [0, 1, 2, 1, 1, 2]
    assert fleet.outstanding_ns(0) == (100 + 30 + 30) * S
    assert fleet.outstanding_ns(25 * S) == (75 + 5 + 5) * S
    assert (fleet.routed_ns, fleet.last_done_ns()) == (160 * S, 100 * S)


def test_of_replicas_without_work_the_one_without_it_for_the_longest_is_next() -> None:
    fleet = router(3)
    assert [fleet.route(0, prompt, 1) for prompt in (30, 10, 20)] == [0, 1, 2]
    assert [fleet.route((100 + at) * S, 1, 1) for at in (0, 10, 20, 30)] == [1, 2, 0, 1]


def test_a_request_goes_where_the_longest_prefix_of_it_is() -> None:
    fleet = router(3, bound=10.0)
    assert fleet.route(0, 20, 1, (1, 2)) == 0
    assert fleet.route(0, 20, 1, (1, 3)) == 0, "10 tokens are saved, for which it may wait 100 s"
    assert fleet.route(0, 20, 1, (7, 8)) == 1
    assert fleet.route(0, 30, 1, (7, 8, 9)) == 1
    assert fleet.route(0, 5, 1) == 2
    # what was found was not counted as work: 21 + 11 at the first, 21 + 11 at the second
    assert fleet.outstanding_ns(0) == (32 + 32 + 6) * S


def test_a_prefix_is_given_up_when_its_replica_has_too_much_to_do_and_is_then_in_two_places() -> None:
    fleet = router(2, bound=2.0)
    assert [fleet.route(0, 10, 11, (1,)), fleet.route(0, 10, 9, (1,))] == [0, 1], "21 s are more than 2 x 9"
    assert fleet.outstanding_ns(0) == (21 + 19) * S
    # now both have it; the second is done first
    assert fleet.route(0, 10, 10, (1,)) == 1
    assert fleet.route(0, 10, 10, (1,)) == 0


def test_a_wait_of_exactly_the_bound_is_borne() -> None:
    fleet = router(2, bound=2.0)
    assert [fleet.route(0, 11, 9, (1,)), fleet.route(0, 11, 1, (1,))] == [0, 0]


def test_the_least_loaded_replica_uses_what_it_has_of_a_prefix_that_another_has_more_of() -> None:
    fleet = router(2, bound=0.0)
    assert fleet.route(0, 10, 30, (1,)) == 0
    assert fleet.route(0, 10, 1, (1,)) == 1
    assert fleet.route(30 * S, 30, 60, (1, 2, 3)) == 1, "it has as much and less to do"
    assert fleet.route(80 * S, 30, 1, (1, 2, 3)) == 0
    assert fleet.last_done_ns() == (30 + 20 + 60) * S
    assert fleet.outstanding_ns(80 * S) == (30 + 21) * S


def test_a_replica_is_thought_to_have_forgotten_what_its_cache_has_no_room_for() -> None:
    fleet = router(2, bound=100.0, cache_blocks=3)
    assert fleet.route(0, 20, 1, (1, 2)) == 0
    assert fleet.route(0, 20, 1, (5, 6)) == 1
    assert fleet.route(0, 20, 1, (1, 3)) == 0
    # 1 was used again, so that 2 is what one block more takes away
    before = fleet.routed_ns
    assert fleet.route(0, 30, 1, (1, 3, 4)) == 0
    assert fleet.route(0, 20, 1, (1, 2)) == 0
    assert fleet.routed_ns - before == (11 + 11) * S


def test_what_a_removed_replica_had_is_forgotten_and_it_gets_nothing_more() -> None:
    fleet = router(2, bound=100.0)
    assert fleet.route(0, 10, 1, (1,)) == 0
    assert fleet.remove(0) == 11 * S
    assert [fleet.route(0, 10, 1, (1,)), fleet.route(0, 500, 1)] == [1, 1]
    assert fleet.replicas == [1]


# ------------------------------------------------------------------------------------------------------- autoscaler


def test_more_replicas_are_wanted_at_once_and_fewer_only_after_a_whole_hold() -> None:
    scaling = Scaling(10, is_reactive=True, least=1, utilisation=0.5, window_ns=10 * S, hold_ns=30 * S)
    autoscaler = Autoscaler(scaling)
    # a replica is wanted to do 5 s of work in a window
    assert [autoscaler.needed(work * S) for work in (0, 5, 6, 20, 1000)] == [1, 1, 2, 4, 10]
    work = {10: 20, 20: 5, 30: 5, 40: 15, 50: 5, 60: 5, 70: 5, 80: 26}
    count, counts = 1, []
    for now, came in work.items():
        count = autoscaler.decide(now * S, count, came * S)
        counts.append(count)
    assert counts == [4, 4, 4, 3, 3, 3, 1, 6]


def test_the_number_of_replicas_follows_the_work() -> None:
    scaling = Scaling(
        9, is_reactive=True, utilisation=1.0, window_ns=10 * S, hold_ns=20 * S, cold_start_ns=round(5.5 * S)
    )
    # one a second, two a second, then one each 5 s; 1 s of work each
    times = [*range(10), *(10 + at / 2 for at in range(20)), *range(20, 71, 5)]
    fleet = Router(work_model(), bound=0.0, block_tokens=10, cache_blocks=0)
    played = play(superposed(trace([float(at) for at in times])), fleet, scaling, first_ns=10 * S)
    # at 20 the one that there is has half of 20 s yet to do, and 20 came: 3 are needed; at 30 it has 1.5 s left to do
    assert played.moments[:4] == [
        Moment(10 * S, 1, 0, 0, 10 * S),
        Moment(20 * S, 1, 2, 10 * S, 20 * S),
        Moment(30 * S, 3, 0, 2 * S, 2 * S),
        Moment(40 * S, 1, 0, 0, 2 * S),
    ]
    assert played.lives == [
        Life(0, 0, 70 * S + S),
        Life(20 * S, round(25.5 * S), 40 * S),
        Life(20 * S, round(25.5 * S), 40 * S),
    ]
    assert played.replica.tolist()[30:34] == [0, 0, 1, 2], "at 20 and 25 the new ones are not there; at 30 they are"
    assert played.peak == 3
    assert played.gpu_hours == pytest.approx((71 + 20 + 20) / 3600)


def test_a_fixed_fleet_is_there_from_the_begin_to_the_end() -> None:
    fleet = Router(work_model(), bound=0.0, block_tokens=10, cache_blocks=0)
    played = play(superposed(trace([0.0, 0.0, 0.5, 3.0])), fleet, Scaling(2), first_ns=0)
    assert played.replica.tolist() == [0, 1, 0, 1]
    assert (played.lives, played.end_ns, played.work_ns) == ([Life(0, 0, 4 * S)] * 2, 4 * S, 4 * S)


# ---------------------------------------------------------------------------------------------------------- traffic


def test_copies_of_a_trace_are_shifted_in_time_within_it_and_the_first_is_not() -> None:
    requests = [TraceRequest(index, at * S, 1 + index, 1) for index, at in enumerate((0, 1, 5))]
    traffic = superposed(requests, 50, seed=1)
    assert len(traffic) == 150
    assert (np.diff(traffic.at_ns) >= 0).all()
    assert traffic.at_ns[0] >= 0
    assert traffic.at_ns[-1] <= 5 * S
    duration = 5 * S + 1
    shifts = []
    for copy in range(50):
        own = traffic.copy == copy
        times = traffic.at_ns[own][np.argsort(traffic.source[own])]
        assert ((times - times[0]) % duration).tolist() == [0, S, 5 * S]
        shifts.append(int(times[0]))
    assert shifts[0] == 0
    assert len(set(shifts)) == 50
    assert np.array_equal(traffic.at_ns, superposed(requests, 50, seed=1).at_ns)
    assert not np.array_equal(traffic.at_ns, superposed(requests, 50, seed=2).at_ns)
    assert superposed(requests, 2, shift_s=0.0).at_ns.tolist() == [0, 0, S, S, 5 * S, 5 * S]


def test_equal_names_are_equal_prefixes_and_copies_have_their_own_unless_they_share() -> None:
    requests = [TraceRequest(at, at * S, 1024, 1, blocks=blocks) for at, blocks in enumerate([(1, 2), (1, 3), (4, 2)])]
    own, shared = superposed(requests, 2), superposed(requests, 2, share=True)
    assert [own.blocks(source, 0) for source in range(3)] == [(0, 1), (0, 2), (3, 4)]
    assert [own.blocks(source, 1) for source in range(3)] == [(5, 6), (5, 7), (8, 9)]
    assert [shared.blocks(source, 1) for source in range(3)] == [(0, 1), (0, 2), (3, 4)]


# ----------------------------------------------------------------------------------------------------------- search


def tried(threshold: int, low: int, most: int) -> tuple[int | None, list[int]]:
    counts: list[int] = []

    def meets(count: int) -> bool:
        counts.append(count)
        return count >= threshold

    return fewest(meets, low, most), counts


def test_the_fewest_replicas_that_do_are_found_in_few_tries() -> None:
    assert tried(1, 1, 32) == (1, [1])
    assert tried(7, 2, 64) == (7, [2, 3, 5, 9, 7, 6])
    assert tried(7, 20, 64) == (7, [20, 19, 17, 13, 5, 9, 7, 6])
    assert tried(99, 4, 9) == (None, [4, 5, 7, 9])
    found, counts = tried(1234, 1000, 32000)
    assert found is not None
    assert 1234 <= found <= 1234 * 1.02
    assert len(counts) <= 8
